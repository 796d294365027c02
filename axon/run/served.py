"""Serving a trained model over HTTP."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from axon.config import load
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.layout import Layout
from axon.run.trained import Trained, TrainedHub, open_trained
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.draft_model import DraftModel
from axon.serve.engine import Engine
from axon.serve.http.limits import Limits
from axon.serve.runner import check_continues
from axon.serve.speculation import Drafter, NGram

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
) -> bool:
    """Serve the folder of a run, or `hf:DIR_OR_NAME`, until told to stop; whether all requests were answered.

    `layout`: a gin file that binds `Layout`, by which the model is split over devices; None: it is on one device.
    `draft`: what guesses tokens, for steps that verify several: `ngram`, or a smaller model as `path` names one.
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
    engine = _engine(trained, layout, draft, capacity, tokenizer, report)
    report("compiling every step that there can be")
    engine.warm_up()
    grammars = Grammars(tokenizer, engine.vocab)
    folder = trained.hub.folder if isinstance(trained, TrainedHub) else None
    chat = Conversations(Chat.of(folder, tokenizer), grammars)
    return serve(Served(_name(path), engine, chat, grammars), host, port, limits, report)


def _engine(
    trained: Trained, layout: Path | None, draft: str | None, capacity: Capacity, tokenizer: Tokenizer, report: Report
) -> Engine:
    split = Layout() if layout is None else load(layout, root="Layout").tree
    runtime, values, variables = _on_devices(trained, split, report)
    if (others := len(jax.devices()) - runtime.placement.mesh.size) > 0:
        report(f"{others} devices more have nothing to do: --layout says how to split a model")
    drafter = None if draft is None else _drafter(draft, tokenizer, split, report)
    return Engine(runtime, values, variables, tokenizer=tokenizer, capacity=capacity, drafter=drafter)


def _on_devices(trained: Trained, layout: Layout, report: Report) -> tuple[Runtime, Any, Any]:
    """Its runtime, parameters and variables. Raises `UserError` for a model that goes on with no text."""
    train, devices = trained.train, _as_many_as_split(layout)
    dtype = train.precision.compute_dtype(devices[0].platform)  # each step reads all weights, as they are used
    runtime = Runtime(train.model, layout, precision=train.precision, weights=dtype, devices=devices)
    check_continues(runtime.module)
    return runtime, *trained.restore(runtime, train.model, report)


def _drafter(draft: str, tokenizer: Tokenizer, layout: Layout, report: Report) -> Drafter:
    """Raises `UserError` for a model of another tokenizer."""
    if draft == "ngram":
        return NGram()
    trained = open_trained(draft)
    if trained.tokenizer.load().to_json() != tokenizer.to_json():
        raise UserError(f"--draft {draft} has another tokenizer than the model: guesses need one that has the same ids")
    return DraftModel(*_on_devices(trained, layout, report))


def _as_many_as_split(layout: Layout) -> list[Any]:
    """The first devices, as many as the mesh has; all, if it says so, or if it has more than there are."""
    sizes = layout.mesh.values()
    return jax.devices() if -1 in sizes else jax.devices()[: math.prod(sizes)]


def _name(path: str | Path) -> str:
    """What clients call the model: its folder's name, or that of the hub."""
    name = str(path).removeprefix("hf:").rstrip("/")
    return Path(name).name if Path(name).exists() or "://" in name else name
