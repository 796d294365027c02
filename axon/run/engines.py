"""The engine of a trained model, or its encoder, or as many as its layout makes of the devices."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from axon.config import load
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.layout import Layout, first_devices
from axon.nn.multi_lora import Room, room_for
from axon.run.trained import Trained, TrainedHub, open_trained
from axon.run.weights import restore_as_stored
from axon.runtime import Runtime
from axon.serve.capacity import LENGTH, Capacity
from axon.serve.check_layout import check_serves
from axon.serve.draft_model import DraftModel
from axon.serve.embedder import TextEncoder
from axon.serve.engine import Engine
from axon.serve.multi_token import MultiToken
from axon.serve.replicas import Replicas, copied, shares
from axon.serve.sentence_transformers import Sentences
from axon.serve.speculation import Drafter, NGram
from axon.serve.text_model import EncoderDecoder, check_writes

MULTI_TOKEN = "mtp"
"""What `draft` is where the model's own multi-token block guesses, as others call it."""

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
    room: Room = Room(),
) -> Engine | Replicas:
    """See `axon.run.serve_run.serve_run`. `capacity`: of each engine. `room`: of adapters.
    Raises `UserError` for a model that writes no text, and for a draft model of another tokenizer."""
    check_writes(trained.train.model.build())
    own = _shares(trained, layout, report)
    models = _copies(trained, own, weights, report, _with_block(trained) if draft == MULTI_TOKEN else None, room)
    drafters = [None] * len(own) if draft is None else _drafters(draft, tokenizer, own, weights, report)
    engines = [
        Engine(*model, tokenizer=tokenizer, capacity=capacity, drafter=drafter)
        for model, drafter in zip(models, drafters, strict=True)
    ]
    return Replicas(engines) if len(engines) > 1 else engines[0]


def encoders_of(
    trained: Trained, layout: Path | None, sentences: Sentences, length: int | None, report: Report
) -> list[TextEncoder]:
    """Of an encoder, on the devices that an engine each would have. `length`: tokens of a text, at most; None: as many
    as the model has positions, or as `sentences` says."""
    models = _copies(trained, _shares(trained, layout, report), None, report)
    positions = models[0][0].module.max_length
    found = [one for one in (length, sentences.length, positions) if one is not None]
    most = min(found, default=LENGTH)
    return [TextEncoder(*model, sentences.pooling, most) for model in models]


def decoders_as_encoders(engine: Engine | Replicas, sentences: Sentences) -> list[TextEncoder]:
    """Of the decoders of these engines, with the same arrays. Raises `UserError` for encoder–decoders."""
    engines = engine.engines if isinstance(engine, Replicas) else (engine,)
    if isinstance(module := engines[0].runtime.module, EncoderDecoder):
        name = type(module).__name__
        raise UserError(
            f"--embeddings: a {name} is an encoder–decoder, and texts are embedded by an encoder or a decoder"
        )
    most = min(one for one in (sentences.length, engine.max_length) if one is not None)
    return [TextEncoder(one.runtime, one.parameters, one.variables, sentences.pooling, most) for one in engines]


def _shares(trained: Trained, layout: Path | None, report: Report) -> list[Share]:
    """The devices of each engine by a layout's file; without one, each device alone."""
    split = Layout() if layout is None else load(layout, root="Layout").tree
    split = split.with_axes_of(trained.train.layout)
    runtime = Runtime(trained.train.model, split, devices=first_devices(split))
    check_serves(runtime)
    own = shares(runtime)
    used = sum(len(devices) for _, devices in own)
    if (others := len(jax.devices()) - used) > 0:
        report(f"{others} devices more have nothing to do: --layout says how to split a model")
    if len(own) > 1:
        report(f"{len(own)} engines, which share the requests, on {len(own[0][1])} of {used} devices each")
    return own


def _copies(
    trained: Trained,
    own: Sequence[Share],
    weights: str | None,
    report: Report,
    model: Any = None,
    room: Room = Room(),
) -> list[tuple[Runtime, Any, Any]]:
    """For each share its runtime, parameters and variables; what is stored is read once. `model`: instead of the run's,
    with more of what is stored. `room`: of adapters beside."""
    train = trained.train
    compute = train.precision.compute_dtype(own[0][1][0].platform)
    dtype = weights or compute  # each step reads all, as they are used
    runtimes = [
        Runtime(
            model or train.model,
            layout.with_axes_of(train.layout),
            precision=train.precision,
            weights=dtype,
            devices=devices,
            transforms=room_for(room, dtype, compute),
        )
        for layout, devices in own
    ]
    values, variables = restore_as_stored(trained, runtimes[0], report, model)
    return [(runtime, *copied(runtime, values, variables)) for runtime in runtimes]


def _with_block(trained: Trained) -> Any:
    """The model with its block that predicts the token after the next, which one of the hub has only where it is asked
    for. Raises `UserError` for a model without it."""
    model: Any = trained.train.model
    if isinstance(trained, TrainedHub):
        model = trained.hub.with_mtp
    if model.build().has_mtp:
        return model
    raise UserError(
        f"--draft {MULTI_TOKEN}: the model has no block that predicts the token after the next, as files of "
        "DeepSeek-V3 and Qwen3-Next may have, and runs with DeepSeek.multi_token or Qwen3Next.multi_token; --draft "
        "ngram needs none"
    )


def _drafters(
    draft: str, tokenizer: Tokenizer, own: Sequence[Share], weights: str | None, report: Report
) -> list[Drafter]:
    if draft == "ngram":
        return [NGram() for _ in own]
    if draft == MULTI_TOKEN:
        return [MultiToken() for _ in own]
    trained = open_trained(draft)
    if trained.tokenizer.load().to_json() != tokenizer.to_json():
        raise UserError(f"--draft {draft} has another tokenizer than the model: guesses need one that has the same ids")
    check_writes(trained.train.model.build())
    return [DraftModel(*model) for model in _copies(trained, own, weights, report)]
