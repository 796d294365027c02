"""How long attention over pages takes in a decode step on a TPU, by the recorded bundles of its kernels.

The compiler's estimates leave Pallas kernels out. Their bundles, which it issues one a cycle, are recorded
(`axon bench kernels --bundles`): the kernel computes on one step of positions while the pages of the next arrive, so
that a step takes the longer of the two.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from axon.axes import ArraySpec
from axon.chips import KERNEL_CHIPS, Chip
from axon.plan.bundles import recorded
from axon.serve.program import ServingProgram

STEP, HEADS, HEAD_DIM = 512, 8, 128
"""Positions of a step of the kernel, and the heads of keys, and their width, of which its bundles are recorded."""

PAGE_BUNDLES, GROUP_BUNDLES = 17, 77
"""At most, of any chip (docs/kernels/paged_attention.md): to start a page's copies, and to write a group of rows."""


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of all layers: `compute`, the bundles' of reading; `memory`, the pages' bytes at the bandwidth; `write`,
    of the new tokens, whichever of both is longer; `total`."""

    compute: float
    memory: float
    write: float
    total: float


def attention_time(program: ServingProgram, chip: str, context: int | None = None) -> AttentionTime:
    """Of a decode step in which all requests have `context` tokens, by default half their length, as far as there are
    pages; on one of the program's devices, a `chip`."""
    context = context or program.length // 2
    parts = [_of_kind(program, chip, specs, window, context) for specs, window in program.caches]
    compute, memory, write = (sum(values) for values in zip((0.0, 0.0, 0.0), *parts, strict=True))
    return AttentionTime(compute, memory, write, sum(max(part[:2]) + part[2] for part in parts))


def pages_read(program: ServingProgram, context: int) -> float:
    """Bytes of pages that a decode step reads of each device's memory, where all requests have `context` tokens."""
    return sum(_read(program, specs, window, context)[1] for specs, window in program.caches)


def _read(
    program: ServingProgram, specs: Mapping[str, ArraySpec], window: int | None, context: int
) -> tuple[int, float]:
    """Tokens that each request sees in the layers of a kind, and the bytes of all requests' on a device."""
    pool, requests = program.pools[window], program.capacity.requests
    seen = min(context, (pool.count - 1) * pool.size // requests, window or program.length)
    share = requests * seen / (pool.count * pool.size)
    return seen, share * sum(map(program.step.placement.bytes_per_device, specs.values()))


def _of_kind(
    program: ServingProgram, name: str, specs: Mapping[str, ArraySpec], window: int | None, context: int
) -> tuple[float, float, float]:
    """`compute`, `memory` and `write` of the layers of a kind; of latents, which no kernel reads, `memory` alone."""
    chip, requests, placement = KERNEL_CHIPS[name], program.capacity.requests, program.step.placement
    seen, size = _read(program, specs, window, context)
    memory = size / chip.bandwidth
    spec = specs.get("key", specs.get("latent"))
    assert spec is not None, "pages of keys and values, or of latents"
    shard = dict(zip(spec.axes, placement.sharding(spec.axes, spec.kind).shard_shape(spec.shape), strict=True))
    heads, width = shard.get("kv_heads"), spec.shape[-1]
    if heads is None:
        return 0.0, memory, 0.0
    layers = math.prod(size for axis, size in shard.items() if axis.endswith("layers"))
    steps = layers * requests * -(-seen // STEP)
    products = _recorded(name) * (heads / HEADS) * (width / HEAD_DIM)
    bundles = steps * (products + PAGE_BUNDLES * STEP / program.page_size)
    write = layers * requests * _write_seconds(chip, heads * width)
    return bundles / (_clock(chip) * chip.cores), memory, write


def _write_seconds(chip: Chip, width: int) -> float:
    """Of one token in a layer: the tiles of rows, 32 bytes high, of its keys and of its values are read and written."""
    return max(GROUP_BUNDLES / _clock(chip), 4 * 32 * width / chip.bandwidth)


def _clock(chip: Chip) -> float:
    assert chip.clock is not None, "a chip whose clock is known"
    return chip.clock


def _recorded(chip: str) -> int:
    """Bundles of the products and the softmax of a step."""
    return recorded()["paged_attention: decode, block of pages"]["bundles"][chip]
