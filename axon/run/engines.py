"""The engine of a trained model, or as many as its layout makes of the devices."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from axon.config import load
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.layout import Layout
from axon.run.trained import Trained, open_trained
from axon.run.weights import restore_as_stored
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.draft_model import DraftModel
from axon.serve.engine import Engine
from axon.serve.replicas import Replicas, copied, shares
from axon.serve.runner import check_continues
from axon.serve.speculation import NGram

Report = Callable[[str], None]
Share = tuple[Layout, list[Any]]
"""A layout, and the devices that it splits a model over."""


def engine_of(
    trained: Trained,
    layout: Path | None,
    draft: str | None,
    capacity: Capacity,
    tokenizer: Tokenizer,
    report: Report,
    weights: str | None = None,
) -> Engine | Replicas:
    """See `axon.run.served.serve_run`. `capacity`: of each engine. Raises `UserError` for a model that goes on with no
    text, and for a draft model of another tokenizer."""
    split = Layout() if layout is None else load(layout, root="Layout").tree
    own = shares(Runtime(trained.train.model, split, devices=_as_many_as_split(split)))
    used = sum(len(devices) for _, devices in own)
    if (others := len(jax.devices()) - used) > 0:
        report(f"{others} devices more have nothing to do: --layout says how to split a model")
    if len(own) > 1:
        report(f"{len(own)} engines, which share the requests, on {len(own[0][1])} of {used} devices each")
    models = _copies(trained, own, weights, report)
    drafters = [None] * len(own) if draft is None else _drafters(draft, tokenizer, own, weights, report)
    engines = [
        Engine(*model, tokenizer=tokenizer, capacity=capacity, drafter=drafter)
        for model, drafter in zip(models, drafters, strict=True)
    ]
    return Replicas(engines) if len(engines) > 1 else engines[0]


def _as_many_as_split(layout: Layout) -> list[Any]:
    """The first devices, as many as the mesh has; all, if it says so, or if it has more than there are."""
    sizes = layout.mesh.values()
    return jax.devices() if -1 in sizes else jax.devices()[: math.prod(sizes)]


def _copies(
    trained: Trained, own: Sequence[Share], weights: str | None, report: Report
) -> list[tuple[Runtime, Any, Any]]:
    """For each share its runtime, parameters and variables; what is stored is read once."""
    train = trained.train
    dtype = weights or train.precision.compute_dtype(own[0][1][0].platform)  # each step reads all, as they are used
    runtimes = [
        Runtime(train.model, layout, precision=train.precision, weights=dtype, devices=devices)
        for layout, devices in own
    ]
    check_continues(runtimes[0].module)
    values, variables = restore_as_stored(trained, runtimes[0], report)
    return [(runtime, *copied(runtime, values, variables)) for runtime in runtimes]


def _drafters(
    draft: str, tokenizer: Tokenizer, own: Sequence[Share], weights: str | None, report: Report
) -> list[NGram | DraftModel]:
    if draft == "ngram":
        return [NGram() for _ in own]
    trained = open_trained(draft)
    if trained.tokenizer.load().to_json() != tokenizer.to_json():
        raise UserError(f"--draft {draft} has another tokenizer than the model: guesses need one that has the same ids")
    return [DraftModel(*model) for model in _copies(trained, own, weights, report)]
