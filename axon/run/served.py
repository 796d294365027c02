"""Serving a trained model over HTTP."""

from collections.abc import Callable
from pathlib import Path

from axon.errors import UserError
from axon.run.engines import engine_of
from axon.run.trained import TrainedHub, open_trained
from axon.serve.capacity import Capacity
from axon.serve.http.limits import Limits

Report = Callable[[str], None]


def serve_run(
    path: str | Path,
    layout: Path | None,
    draft: str | None,
    capacity: Capacity,
    limits: Limits,
    host: str,
    port: int,
    report: Report,
    weights: str | None = None,
) -> bool:
    """Serve the folder of a run, or `hf:DIR_OR_NAME`, until told to stop; whether all requests were answered.

    `layout`: a gin file that binds `Layout`, by which the model is split over devices; None: it is whole on each. Where
    the mesh has axes that split the batch and no weight, there are as many engines, which share the requests; each has
    its own `capacity`.
    `draft`: what guesses tokens, for steps that verify several: `ngram`, or a smaller model as `path` names one.
    `weights`: the dtype in which both models' are stored, as of `axon.runtime.Runtime`; None: that of the arithmetic.
    Raises `UserError` without the packages of the extra `serve`, and for a model that goes on with no text.
    """
    try:
        from axon.serve.chat import Chat
        from axon.serve.grammar import Grammars
        from axon.serve.http.conversations import Conversations
        from axon.serve.http.model import Served
        from axon.serve.http.serve import serve
    except ModuleNotFoundError as error:
        raise UserError(f"axon serve needs {error.name}: pip install 'axon-jax[serve]'") from error
    trained = open_trained(path)
    tokenizer = trained.tokenizer.load()
    engine = engine_of(trained, layout, draft, capacity, tokenizer, report, weights)
    report("compiling every step that there can be")
    engine.warm_up()
    grammars = Grammars(tokenizer, engine.vocab)
    folder = trained.hub.folder if isinstance(trained, TrainedHub) else None
    chat = Conversations(Chat.of(folder, tokenizer), grammars)
    return serve(Served(_name(path), engine, chat, grammars), host, port, limits, report)


def _name(path: str | Path) -> str:
    """What clients call the model: its folder's name, or that of the hub."""
    name = str(path).removeprefix("hf:").rstrip("/")
    return Path(name).name if Path(name).exists() or "://" in name else name
