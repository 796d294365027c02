"""The programs of an exported model, as StableHLO (`jax.export`): a forward and a decode step, or, of an
encoder–decoder, the encoder and a decode step.

A program is of one platform, as it is traced for one: kernels and the compute dtype are chosen there. Its shapes are
fixed, since attention plans its blocks for them while it is traced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, export

from axon import axes
from axon.axes import ArraySpec
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn import CacheSpec, Inputs
from axon.precision import Precision
from axon.runtime import Runtime, flattened, nested
from axon.serve.text_model import EncoderDecoder, TextModel, encoder_inputs

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""What `jax.export` calls a platform → what a layout does."""

Flat = Mapping[str, Any]
"""Arrays, or what describes them, by path: `layers/block/mlp/up`."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that programs are exported for: sequences, and the positions of each, in `forward` or `encode` and in a
    cache."""

    batch: int
    length: int


@dataclass(frozen=True)
class ExportedProgram:
    """A program, and its operands and results as a manifest describes them."""

    name: str
    exported: export.Exported
    inputs: dict[str, Any]
    outputs: dict[str, Any]


def one_device(layout: Layout) -> Layout:
    """`layout` for a mesh of one device: its axes stay known, and nothing is split or overlapped."""
    return replace(layout, mesh={}, replicate_kv=1, context=None, overlap=(), pad_layers=False)


def export_programs(
    model: Any, layout: Layout, precision: Precision, platform: str, sizes: Sizes
) -> tuple[list[ExportedProgram], dict[str, str]]:
    """The programs of `model` for one device of a platform, and what was chosen for them: `forward` and `decode`, or
    `encode` and `decode` of an encoder–decoder.

    The device need not be here, and its kernels are the best for it: a run's `Execution` is that of training.
    Raises `UserError` where the platform cannot have the program.
    """
    placement = Placement.described(layout, 1, PLATFORMS[platform])
    runtime = Runtime(model, layout, precision=precision, placement=placement)
    return _programs(runtime, platform, sizes), dict(runtime.choices)


def _programs(runtime: Runtime, platform: str, sizes: Sizes) -> list[ExportedProgram]:
    operands = _Operands(runtime, sizes)
    with runtime.tracing():
        cache = flattened(runtime.module.layers.cache_specs(sizes.batch, sizes.length))
    inputs = {"weights": operands.weights, "tokens": operands.tokens}
    if isinstance(runtime.module, EncoderDecoder):
        width = runtime.module.dims["embed"]
        encoded = ArraySpec(("batch", "seq", "embed"), (*operands.tokens.shape, width), jnp.float32)
        lens = ArraySpec(("batch",), (sizes.batch,), jnp.int32)
        read = inputs | {"lens": lens}, {"encoded": encoded, "logits": operands.last, "cache": cache}
        first = _program("encode", runtime, platform, _encode(runtime, cache), *read)
    else:
        logits = replace(operands.last, axes=("batch", "seq", "vocab"), shape=(*operands.tokens.shape, operands.vocab))
        read = inputs | {"positions": operands.tokens}, {"logits": logits}
        first = _program("forward", runtime, platform, _forward(runtime), *read)
    return [first, _program("decode", runtime, platform, _decode(runtime), *operands.of_decode(cache))]


def _forward(runtime: Runtime) -> Callable[..., Array]:
    def forward(weights: Flat, tokens: Array, positions: Array) -> Array:
        model = runtime.bind(weights)
        hidden, *_ = model.hidden(Inputs(axes.shard(tokens, "batch seq"), axes.shard(positions, "batch seq")))
        return model.output.logits(hidden).astype(jnp.float32)

    return forward


def _decode(runtime: Runtime) -> Callable[..., tuple[Array, Flat]]:
    def decode(weights: Flat, cache: Flat, tokens: Array, start: Array) -> tuple[Array, Flat]:
        return _next_logits(runtime.bind(weights), cache, tokens, start)

    return decode


def _encode(runtime: Runtime, cache: Mapping[str, CacheSpec]) -> Callable[..., tuple[Array, Array, Flat]]:
    """The encoder, and the first step of the decoder, after which it goes on as `_decode`."""

    def encode(weights: Flat, tokens: Array, lens: Array) -> tuple[Array, Array, Flat]:
        model: EncoderDecoder = runtime.bind(weights)
        encoded, _ = model.encode(encoder_inputs(tokens, lens))
        empty = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in cache.items()}
        first = jnp.full((len(tokens), 1), model.start_id, jnp.int32)
        filled = empty | flattened(model.encoded_states(encoded, lens))
        return encoded.astype(jnp.float32), *_next_logits(model, filled, first, jnp.int32(0))

    return encode


def _next_logits(model: TextModel, cache: Flat, tokens: Array, start: Array) -> tuple[Array, Flat]:
    """Logits `batch vocab` of what follows `tokens[batch 1]` at `start`, and the cache with these in it."""
    positions = jnp.broadcast_to(start, tokens.shape)
    inputs = Inputs(axes.shard(tokens, "batch seq"), axes.shard(positions, "batch seq"), start=start)
    hidden, filled, _ = model.hidden(inputs, nested(cache))
    return model.output.logits(hidden)[:, 0].astype(jnp.float32), flattened(filled)


@dataclass(frozen=True)
class _Operands:
    """What programs are given, and the logits that they give."""

    runtime: Runtime
    sizes: Sizes

    @property
    def weights(self) -> Flat:
        return {**self.runtime.parameters, **self.runtime.variables}

    @property
    def tokens(self) -> ArraySpec:
        return ArraySpec(("batch", "seq"), (self.sizes.batch, self.sizes.length), jnp.int32)

    @property
    def vocab(self) -> int:
        return self.runtime.module.dims["vocab"]

    @property
    def last(self) -> ArraySpec:
        """Logits of one position."""
        return ArraySpec(("batch", "vocab"), (self.sizes.batch, self.vocab), jnp.float32)

    def of_decode(self, cache: Flat) -> tuple[dict[str, Any], dict[str, Any]]:
        """Operands and results of a decode step."""
        token, start = replace(self.tokens, shape=(self.sizes.batch, 1)), ArraySpec((), (), jnp.int32)
        inputs = {"weights": self.weights, "cache": cache, "tokens": token, "start": start}
        return inputs, {"logits": self.last, "cache": cache}


def _abstract(inputs: Mapping[str, Any]) -> list[Any]:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), list(inputs.values()))


def _program(
    name: str, runtime: Runtime, platform: str, fn: Callable[..., Any], inputs: dict[str, Any], outputs: dict[str, Any]
) -> ExportedProgram:
    jitted = jax.jit(fn)
    operands = _abstract(inputs)
    with runtime.tracing():
        jitted.trace(*operands)  # first, so that an error below is the platform's
        try:
            exported = export.export(jitted, platforms=[platform])(*operands)
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{name} cannot be exported for {platform}: {error}. Leave {platform} out of --platforms"
            ) from error
    return ExportedProgram(name, exported, inputs, outputs)
