"""A model for those without Axon: a folder with its programs as StableHLO, its weights, and a script that runs them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axon.axes import ArraySpec
from axon.axes.patterns import base
from axon.checkpoint.huggingface.save import Entry, fetch_from, write_weights
from axon.checkpoint.huggingface.weights import DTYPES
from axon.disk import writing
from axon.errors import UserError
from axon.serve.export_programs import PLATFORMS, ExportedProgram, Flat, Sizes
from axon.serve.text_model import TextModel, check_writes

STORED = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}
"""Dtype → its name in safetensors."""

MOST_POSITIONS = 2**24
"""Of all sequences together: a program's arrays of positions are in memory while it is traced."""

MANIFEST = "manifest.json"
RUNNER = "run.py"


def check_request(module: Any, platforms: Sequence[str], sizes: Sizes) -> None:
    """Raise `UserError` for what cannot be exported."""
    for platform in platforms:
        if platform not in PLATFORMS:
            raise UserError(f"--platforms: unknown platform {platform!r}; expected some of {', '.join(PLATFORMS)}")
    if not platforms or len(set(platforms)) < len(platforms):
        raise UserError(f"--platforms is {','.join(platforms)!r}; expected each of {', '.join(PLATFORMS)} at most once")
    if not isinstance(module, TextModel):
        raise UserError(
            f"{type(module).__name__} cannot be exported: it writes no text. Expected a decoder-only model, an "
            "axon.nn.LanguageModel, or an encoder–decoder as models.t5.T5 builds one"
        )
    check_writes(module)
    if sizes.batch * sizes.length > MOST_POSITIONS:
        raise UserError(
            f"--batch {sizes.batch} with --length {sizes.length} is {sizes.batch * sizes.length:,} positions; "
            f"must be at most {MOST_POSITIONS:,}: lower one of them"
        )
    if module.max_length is not None and sizes.length > module.max_length:
        raise UserError(
            f"--length is {sizes.length}, and this model has {module.max_length} positions: lower it to "
            f"{module.max_length}"
        )


def check_dtypes(arrays: Mapping[str, ArraySpec]) -> None:
    """Raise `UserError` for a model's parameter or variable, by path, of a dtype that weights are not written in."""
    for path, spec in arrays.items():
        if jnp.dtype(spec.dtype) not in STORED:
            raise UserError(
                f"{path} is {jnp.dtype(spec.dtype).name}, and weights are exported as one of "
                f"{', '.join(map(str, STORED))}: declare it with one of these, as Param(…, dtype=jnp.float32)"
            )


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
        (out / MANIFEST).write_text(text + "\n", encoding="utf-8")


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
