"""Serving a trained model over HTTP."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from axon.errors import UserError
from axon.launch.signals import Interrupts, compile_interruptibly
from axon.run.beside import ServedAdapters
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
    *,
    embeddings: bool = False,
    weights: str | None = None,
    defaults: bool = True,
    adapters: ServedAdapters = ServedAdapters(),
) -> bool:
    """Serve the folder of a run, or `hf:DIR_OR_NAME`, until told to stop; whether all requests were answered.

    `layout`: a gin file that binds `Layout`, by which the model is split over devices; None: it is whole on each. Where
    the mesh has axes that split the batch and no weight, there are as many engines, which share the requests; each has
    its own `capacity`.
    `draft`: what guesses tokens, for steps that verify several: `ngram`, `mtp` (the model's own block that predicts the
    token after the next), or a smaller model as `path` names one.
    `embeddings`: whether a model that writes texts embeds them too; an encoder does so in any case, and nothing else.
    `weights`: the dtype in which both models' are stored, as of `axon.runtime.Runtime`; None: that of the arithmetic.
    `defaults`: whether requests that do not say how tokens are drawn have it from the model's generation_config.json.
    `adapters`: that are served beside the model.
    Raises `UserError` without the packages of the extra `serve`, where it cannot listen, and for a model that neither
    goes on with a text nor is an encoder; `Interrupted` by a signal before it serves.
    """
    try:
        from axon.run.served_model import served_model
        from axon.serve.http import serve as server
    except ModuleNotFoundError as error:
        raise UserError(f"axon serve needs {error.name}: pip install 'axon-jax[serve]'") from error
    with server.bound(host, port) as socket:  # now, not after the minutes that the rest may take
        with Interrupts() as interrupts:
            make = partial(served_model, path, layout, draft, embeddings, weights, defaults, adapters, capacity, report)
            model = compile_interruptibly(make, interrupts)
        return server.serve(model, socket, limits, report)
