"""A model for those without Axon: its forward and its decode step as StableHLO (`jax.export`), its weights beside them.

A program is of one platform, as it is traced for one: kernels and the compute dtype are chosen there. Its shapes are
fixed, since attention plans its blocks for them while it is traced.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, export

from axon import axes
from axon.axes import ArraySpec
from axon.axes.patterns import base
from axon.checkpoint.huggingface.save import Entry, fetch_from, write_weights
from axon.checkpoint.huggingface.weights import DTYPES
from axon.disk import writing
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn import Inputs, LanguageModel
from axon.precision import Precision
from axon.runtime import Runtime, flattened, nested

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""What `jax.export` calls a platform → what a layout does."""

STORED = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}
"""Dtype → its name in safetensors."""

MANIFEST = "manifest.json"
RUNNER = "run.py"

Flat = Mapping[str, Any]
"""Arrays, or what describes them, by path: `layers/block/mlp/up`."""


@dataclass(frozen=True)
class Sizes:
    """Those that programs are exported for: sequences, and the positions of each, in `forward` and in a cache."""

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
    """`layout` for a mesh of one device: its axes stay known, and nothing is split, stored elsewhere or overlapped."""
    return replace(layout, mesh={}, replicate_kv=1, context=None, host=(), disk={}, overlap=(), pad_layers=False)


def check_request(module: Any, platforms: Sequence[str], sizes: Sizes) -> None:
    """Raise `UserError` for what cannot be exported."""
    for platform in platforms:
        if platform not in PLATFORMS:
            raise UserError(f"--platforms: unknown platform {platform!r}; expected some of {', '.join(PLATFORMS)}")
    if not platforms or len(set(platforms)) < len(platforms):
        raise UserError(f"--platforms is {','.join(platforms)!r}; expected each of {', '.join(PLATFORMS)} at most once")
    if not isinstance(module, LanguageModel):
        raise UserError(
            f"{type(module).__name__} cannot be exported: only a decoder-only model, an axon.nn.LanguageModel, has a "
            "forward of tokens alone and a decode step"
        )
    if module.max_length is not None and sizes.length > module.max_length:
        raise UserError(
            f"--length is {sizes.length}, and this model has {module.max_length} positions: lower it to "
            f"{module.max_length}"
        )


def export_programs(
    model: Any, layout: Layout, precision: Precision, platform: str, sizes: Sizes
) -> tuple[list[ExportedProgram], dict[str, str]]:
    """The programs `forward` and `decode` of `model` for one device of a platform, and what was chosen for them.

    The device need not be here, and its kernels are the best for it: a run's `Train.kernels` are those of training.
    Raises `UserError` where the platform cannot have the program.
    """
    placement = Placement.described(layout, 1, PLATFORMS[platform])
    runtime = Runtime(model, layout, precision=precision, placement=placement)
    weights = {**runtime.parameters, **runtime.variables}
    tokens = ArraySpec(("batch", "seq"), (sizes.batch, sizes.length), jnp.int32)
    token, start = replace(tokens, shape=(sizes.batch, 1)), ArraySpec((), (), jnp.int32)
    with runtime.tracing():
        cache = flattened(runtime.module.layers.cache_specs(sizes.batch, sizes.length))
    vocab = runtime.module.dims["vocab"]
    logits = ArraySpec(("batch", "seq", "vocab"), (*tokens.shape, vocab), jnp.float32)
    last = ArraySpec(("batch", "vocab"), (sizes.batch, vocab), jnp.float32)
    forward = {"weights": weights, "tokens": tokens, "positions": tokens}
    decode = {"weights": weights, "cache": cache, "tokens": token, "start": start}
    return [
        _program("forward", runtime, platform, _forward(runtime), forward, {"logits": logits}),
        _program("decode", runtime, platform, _decode(runtime), decode, {"logits": last, "cache": cache}),
    ], dict(runtime.choices)


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
        return model.output.logits(hidden)[:, 0].astype(jnp.float32), flattened(filled)

    return decode


def _program(
    name: str, runtime: Runtime, platform: str, fn: Callable[..., Any], inputs: dict[str, Any], outputs: dict[str, Any]
) -> ExportedProgram:
    jitted = jax.jit(fn)
    operands = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), list(inputs.values()))
    with runtime.tracing():
        jitted.trace(*operands)  # first, so that an error below is the platform's
        try:
            exported = export.export(jitted, platforms=[platform])(*operands)
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{name} cannot be exported for {platform}: {error}. Leave {platform} out of --platforms"
            ) from error
    return ExportedProgram(name, exported, inputs, outputs)


def write_export(
    out: Path,
    weights: Flat,
    programs: Mapping[str, tuple[list[ExportedProgram], dict[str, str]]],
    about: Mapping[str, Any],
) -> None:
    """Write into the folder `out` what runs without Axon: weights, programs by platform, a manifest, and `run.py`.

    `about` is what the manifest begins with.
    """
    entries = [Entry(path, STORED[jnp.dtype(value.dtype)], value.shape) for path, value in weights.items()]
    with writing(out):
        fetch = fetch_from(weights)
        files = write_weights(out, entries, lambda path: fetch(path, ()))
        described = {}
        for platform, (of_platform, choices) in programs.items():
            described[platform] = {program.name: _write_program(out, platform, program) for program in of_platform}
            described[platform]["choices"] = choices
        shutil.copyfile(Path(__file__).with_name("exported.py"), out / RUNNER)
        manifest = {**about, "jax": jax.__version__, "weights": files, "programs": described}
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (out / MANIFEST).write_text(text + "\n", encoding="utf-8")  # last: without it nothing opens the folder


def _write_program(out: Path, platform: str, program: ExportedProgram) -> dict[str, Any]:
    file = f"{program.name}.{platform}.jax"
    (out / file).write_bytes(program.exported.serialize())
    operands, results = (
        jax.tree.map(_described, part, is_leaf=lambda x: isinstance(x, ArraySpec))
        for part in (program.inputs, program.outputs)
    )
    return {"file": file, "inputs": operands, "outputs": results}


def _described(spec: ArraySpec) -> dict[str, Any]:
    names = " ".join(base(name).removeprefix("_") for name in spec.axes)
    return {"axes": names, "shape": list(spec.shape), "dtype": jnp.dtype(spec.dtype).name}
