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
from axon.axes.patterns import parse_names
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn import Inputs
from axon.nn.kv_cache import PAGES
from axon.precision import Precision
from axon.runtime import Runtime, flattened, nested
from axon.serve.encoder_decoder import EncoderDecoder

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""What `jax.export` calls a platform → what a layout does."""

CROSS = "_layers batch kv_seq heads head_dim"
CACHED = {"key": PAGES, "value": PAGES, "cross_key": CROSS, "cross_value": CROSS}
"""Name of an array in an encoder–decoder's cache → its axes."""

READ = "documents"
"""In an exported cache of an encoder–decoder: 0 where the encoder read a token, -1 where padding."""

Flat = Mapping[str, Any]
"""Arrays, or what describes them, by path: `layers/block/mlp/up`."""


@dataclass(frozen=True)
class Sizes:
    """Those that programs are exported for: sequences, and the positions of each, in `forward` or `encode` and in a
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
    programs = _encoder_decoder if isinstance(runtime.module, EncoderDecoder) else _decoder_only
    return programs(runtime, platform, sizes), dict(runtime.choices)


# ---- a decoder-only model ---------------------------------------------------------------------------------------


def _decoder_only(runtime: Runtime, platform: str, sizes: Sizes) -> list[ExportedProgram]:
    operands = _Operands(runtime, sizes)
    with runtime.tracing():
        cache = flattened(runtime.module.layers.cache_specs(sizes.batch, sizes.length))
    logits = replace(operands.last, axes=("batch", "seq", "vocab"), shape=(*operands.tokens.shape, operands.vocab))
    forward = {"weights": operands.weights, "tokens": operands.tokens, "positions": operands.tokens}
    return [
        _program("forward", runtime, platform, _forward(runtime), forward, {"logits": logits}),
        _program("decode", runtime, platform, _decode(runtime), *operands.of_decode(cache)),
    ]


def _forward(runtime: Runtime) -> Callable[..., Array]:
    def forward(weights: Flat, tokens: Array, positions: Array) -> Array:
        model = runtime.bind(weights)
        hidden, *_ = model.hidden(Inputs(axes.shard(tokens, "batch seq"), axes.shard(positions, "batch seq")))
        return model.output.logits(hidden).astype(jnp.float32)

    return forward


def _decode(runtime: Runtime) -> Callable[..., tuple[Array, Flat]]:
    def decode(weights: Flat, cache: Flat, tokens: Array, start: Array) -> tuple[Array, Flat]:
        model = runtime.bind(weights)
        positions = jnp.broadcast_to(start, tokens.shape)
        inputs = Inputs(axes.shard(tokens, "batch seq"), axes.shard(positions, "batch seq"), start=start)
        hidden, filled, _ = model.hidden(inputs, nested(cache))
        return _last_logits(model, hidden), flattened(filled)

    return decode


# ---- an encoder–decoder -----------------------------------------------------------------------------------------


def _encoder_decoder(runtime: Runtime, platform: str, sizes: Sizes) -> list[ExportedProgram]:
    operands, encode = _Operands(runtime, sizes), _encode(runtime, sizes.length)
    inputs = {"weights": operands.weights, "tokens": operands.tokens, READ: operands.tokens}
    with runtime.tracing():
        encoded, _, cache = jax.eval_shape(jax.jit(encode), *_abstract(inputs))
    outputs = {
        "encoded": ArraySpec(("batch", "seq", "embed"), encoded.shape, encoded.dtype),
        "logits": operands.last,
        "cache": {path: ArraySpec(_cached_axes(path), array.shape, array.dtype) for path, array in cache.items()},
    }
    return [
        _program("encode", runtime, platform, encode, inputs, outputs),
        _program("decode", runtime, platform, _decode_answer(runtime), *operands.of_decode(outputs["cache"])),
    ]


def _encode(runtime: Runtime, length: int) -> Callable[..., tuple[Array, Array, Flat]]:
    def encode(weights: Flat, tokens: Array, documents: Array) -> tuple[Array, Array, Flat]:
        model, documents = runtime.bind(weights), axes.shard(documents, "batch seq")
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        inputs = Inputs(axes.shard(tokens, "batch seq"), axes.shard(positions, "batch seq"), documents)
        encoded, _ = model.encode(inputs)
        hidden, (cache, *_) = model.begin(encoded, documents, length - 1)
        return encoded.astype(jnp.float32), _last_logits(model, hidden), {READ: documents, **flattened(cache)}

    return encode


def _decode_answer(runtime: Runtime) -> Callable[..., tuple[Array, Flat]]:
    def decode(weights: Flat, cache: Flat, tokens: Array, start: Array) -> tuple[Array, Flat]:
        model, own = runtime.bind(weights), {path: array for path, array in cache.items() if path != READ}
        documents = axes.shard(cache[READ], "batch seq")
        hidden, (filled, *_) = model.advance(tokens, (nested(own), documents, start))
        return _last_logits(model, hidden), {READ: documents, **flattened(filled)}

    return decode


def _cached_axes(path: str) -> tuple[str, ...]:
    """`batch kv_seq` of `READ`; of others as their name says."""
    return parse_names("batch kv_seq" if path == READ else CACHED[path.rpartition("/")[2]])


# ---- of both ----------------------------------------------------------------------------------------------------


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


def _last_logits(model: Any, hidden: Array) -> Array:
    """`batch vocab` of `hidden[batch 1 embed]`."""
    return model.output.logits(hidden)[:, 0].astype(jnp.float32)


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
