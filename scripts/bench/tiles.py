"""`axon bench kernels --search`: the fastest tiles of the attention kernels on this machine's TPU.

Forward and backward are searched one after the other, over all sizes that fit; each candidate runs in turn with the
others, and the least median time wins. What is found goes to `axon/kernels/attention/tiles.json`, for everyone.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axon.errors import UserError
from axon.kernels.attention import AttentionConfig, Causal
from axon.kernels.attention.tiles import TABLE, Tiles, tiles_for
from axon.kernels.attention.tpu import attention_tpu
from scripts.bench.timing import alternate, progress

SIZES = (256, 512, 1024, 2048)
BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 1, 8192, 32, 8, 128
"""Llama 3 8B's attention, at the length that it was trained on."""

Seconds = Callable[[list[Tiles], bool], list[float]]
"""Candidates, and whether their backward is meant → seconds of each; infinite for one that does not compile."""


def search_here() -> str:
    """Search on this machine's TPU and write the table; the result as text. Raises `UserError` without a TPU."""
    device = jax.devices()[0]
    if device.platform != "tpu":
        raise UserError(
            f"axon bench kernels --search runs the kernels on a TPU, and this machine's devices are {device.platform}s"
        )
    found = search(tiles_for(device.device_kind), measured)
    write(device.device_kind, found)
    return f"{device.device_kind}: {found}, written to {TABLE.name}"


def search(begin: Tiles, seconds: Seconds) -> Tiles:
    """The fastest tiles, forward then backward; `begin` if nothing is faster."""
    forward = [replace(begin, rows=r, keys=k) for r, k in itertools.product(SIZES, SIZES)]
    best = _fastest([begin, *forward], seconds, backward=False)
    backward = [replace(best, backward_rows=r, backward_keys=k) for r, k in itertools.product(SIZES, SIZES)]
    return _fastest([best, *backward], seconds, backward=True)


def _fastest(candidates: Iterable[Tiles], seconds: Seconds, backward: bool) -> Tiles:
    distinct = list(dict.fromkeys(candidates))
    taken = seconds(distinct, backward)
    return distinct[int(np.argmin(taken))]


def write(chip: str, tiles: Tiles) -> None:
    """Write a chip's tiles into the table: those that differ from the defaults."""
    table = json.loads(TABLE.read_text())
    usual = asdict(Tiles())
    table[chip] = {name: value for name, value in asdict(tiles).items() if value != usual[name]}
    lines = ",\n".join(f' "{kind}": {json.dumps(fields)}' for kind, fields in sorted(table.items()))
    TABLE.write_text(f"{{\n{lines}\n}}\n")


def measured(candidates: list[Tiles], backward: bool, rounds: int = 9) -> list[float]:
    """Median seconds of each on the current device; infinite for one that the compiler refuses."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    operands = [
        jax.random.normal(key, (BATCH, SEQ, count, HEAD_DIM), jnp.bfloat16)
        for key, count in zip(keys, heads, strict=True)
    ]
    steps = {str(i): _step(tiles, operands, backward) for i, tiles in enumerate(candidates)}
    fitting = {name: step for name, step in steps.items() if step is not None}
    progress(f"{len(fitting)} of {len(steps)} candidates compile; timing {rounds} rounds")
    seconds = alternate(fitting, rounds)
    return [float(np.median(seconds[name])) if name in seconds else float("inf") for name in steps]


def _step(tiles: Tiles, operands: list[Any], backward: bool) -> Callable[[], Any] | None:
    def out(q, k, v):
        return attention_tpu(q, k, v, AttentionConfig(Causal(), HEAD_DIM**-0.5), tiles=tiles)[0]

    def gradients(q, k, v):
        result, backward = jax.vjp(out, q, k, v)
        return backward(result)

    try:
        compiled = jax.jit(gradients if backward else out).lower(*operands).compile()
    except jax.errors.JaxRuntimeError:
        return None
    return lambda: jax.block_until_ready(compiled(*operands))
