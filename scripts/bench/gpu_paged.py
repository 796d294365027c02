"""Our Hopper kernel of paged attention on a GPU: how far it is from the formula, then GB/s of decode steps.

Beside them the GB/s of XLA's own form, and of a copy in the GPU's memory, which is the most that there can be.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon import axes
from axon.kernels.paged_attention import Cache, paged_attention
from axon.kernels.paged_attention.cache import new_tokens
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.reference import paged_attention_reference
from axon.layout import Layout, Placement
from scripts.bench.attention import TOLERANCE, attempt, attention_lines
from scripts.bench.cases.paged_attention import cost
from scripts.bench.timing import alternate, progress

OURS, RIVAL = "mosaic", "xla"

REPEATS = 20
"""Calls of a program that is timed: so the host's part counts for little."""

COPIED = 2**30
"""Bytes of the array that is copied."""


class Problem(NamedTuple):
    """A ragged call.

    Attributes:
        mode: how it is called. lengths: of each sequence, its new tokens, and all with them.
        heads: heads, kv_heads and head_dim. dtype: of the cache. extra: what else each head has.
    """

    mode: str
    lengths: tuple[tuple[int, int], ...]
    dtype: str = "bfloat16"
    page_size: int = 64
    heads: tuple[int, int, int] = (8, 2, 128)
    window: int | None = None
    soft_cap: float | None = None
    extra: tuple[str, ...] = ()
    q: str = "bfloat16"

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(self.heads[2] ** -0.5, self.window, self.soft_cap)

    def __str__(self) -> str:
        more = {f"window {self.window}": self.window, f"soft cap {self.soft_cap}": self.soft_cap}
        extra = [*(name for name, there in more.items() if there), *self.extra]
        return ", ".join([self.mode, self.dtype, f"head_dim {self.heads[2]}", f"pages of {self.page_size}", *extra])


MODES = {
    "decode": ((1, 700), (1, 130), (1, 1), (1, 64)),
    "long decode": ((1, 9000),),
    "prefill and chunk": ((300, 300), (77, 900)),
    "verification": ((4, 600), (4, 90)),
}

DECODES = tuple(
    Problem(mode, lengths, dtype, 128, (32, 8, 128))
    for mode, lengths in (("64 × 2,048", 64 * ((1, 2048),)), ("2 × 32,768", 2 * ((1, 32768),)))
    for dtype in ("bfloat16", "int8", "float8_e4m3fn")
)
"""Those of which the speed is measured, of Llama 3 8B's heads."""


def problems() -> list[Problem]:
    """Every mode over every type of cache, then the rest of what the kernel may be given."""
    found = [
        Problem(m, lengths, dtype) for m, lengths in MODES.items() for dtype in ("bfloat16", "int8", "float8_e4m3fn")
    ]
    found += [Problem(m, lengths, heads=(16, 2, 64)) for m, lengths in MODES.items()]
    found += [Problem("decode", MODES["decode"], page_size=size) for size in (16, 32, 128)]
    found += [Problem(m, MODES[m], "float16", q="float16") for m in ("decode", "prefill and chunk")]
    extra = ("sinks", "alibi_slopes")
    found += [
        Problem(m, MODES[m], window=100, soft_cap=20.0, extra=extra)
        for m in ("decode", "long decode", "prefill and chunk")
    ]
    return found


def check(device: Any) -> dict[str, Any]:
    """Our errors; the speeds of ours and of XLA's; and GB/s of a copy."""
    errors = {str(one): attempt(lambda one=one: error(one, device)) for one in problems()}
    return {"errors": errors, "speeds": speeds(device), "copy": copy_speed(device)}


def error(problem: Problem, device: Any, kernel: str = OURS, seed: int = 0) -> dict[str, Any]:
    """How far an implementation is from the formula in float32, in the Frobenius norm, and if that is near enough."""
    progress(f"paged attention by {kernel}: {problem}")
    with jax.default_device(device), jax.default_matmul_precision("highest"), _scope(device, kernel) as scope:
        rows, cache, inputs = drawn(problem, seed)
        ours, _ = jax.jit(lambda *x: _attend(problem, *x))(rows, cache, inputs)
        wide = [x.astype(jnp.float32) for x in rows]
        exact, _ = jax.jit(lambda q, k, v: paged_attention_reference(q, k, v, cache, inputs, problem.config))(*wide)
    ours, exact = (np.asarray(x, np.float64) for x in (ours, exact))
    off = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
    return {"chosen": scope.choices["paged_attention"], "error": off, "of": "out", "within": off <= TOLERANCE}


def speeds(
    device: Any, found: Sequence[Problem] = DECODES, names: Sequence[str] = (OURS, RIVAL), rounds: int = 10
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each problem and implementation: GB/s, of the bytes that the formula needs; or why it fails."""
    return {
        str(one): {name: attempt(lambda one=one, name=name: _speed(one, device, name, rounds)) for name in names}
        for one in found
    }


def copy_speed(device: Any, size: int = COPIED, rounds: int = 10) -> float:
    """GB/s, read and written, of a copy in the device's memory that changes each number."""
    progress("speed of a copy")
    x = jax.device_put(np.zeros(size // 4, np.int32), device)
    run = jax.jit(lambda x: lax.fori_loop(0, REPEATS, lambda _, x: x + 1, x))
    seconds = alternate({"copy": lambda: jax.block_until_ready(run(x))}, rounds)["copy"]
    return 2 * size * REPEATS / float(np.median(seconds)) / 1e9


def table(found: Mapping[str, Any]) -> str:
    """The findings of `check`, as text."""
    lines = [*attention_lines("our Hopper paged attention, against its formula", found["errors"]), ""]
    lines.append(f"{'GB/s of a decode step; a copy has':80}{found['copy']:10.0f}")
    for name, each in found["speeds"].items():
        lines += [f"{f'{name}, {by}':80}{_text(one)}" for by, one in each.items()]
    return "\n".join(lines)


def _text(one: Mapping[str, Any]) -> str:
    return one.get("unavailable") or f"{one['gb_s']:10.0f}"


def drawn(problem: Problem, seed: int) -> tuple[list[Array], Cache, AttentionInputs]:
    """Queries, keys and values; a cache of random tokens; pages in random order, and what else each head has."""
    (heads, kv_heads, width), size = problem.heads, problem.page_size
    keys, lengths = iter(jax.random.split(jax.random.key(seed), 8)), np.array(problem.lengths)
    columns = -(-int(lengths[:, 1].max()) // size)
    pages = 1 + len(lengths) * columns
    table = 1 + np.random.default_rng(seed).permutation(pages - 1).reshape(len(lengths), columns)
    bounds = np.cumsum([0, *lengths[:, 0]])
    ragged = (jnp.asarray(x, jnp.int32) for x in (lengths[:, 1], table, bounds))
    inputs = AttentionInputs(*ragged, **{name: jax.random.uniform(next(keys), (heads,)) for name in problem.extra})
    normal = lambda *shape: jax.random.normal(next(keys), shape, problem.q)  # noqa: E731
    tokens, kept = (normal(pages * size, kv_heads, width) for _ in range(2)), Cache.empty(2, 1, 1, 1, problem.dtype)
    paged = lambda x: x.reshape(pages, size, *x.shape[1:]).swapaxes(1, 2)  # noqa: E731
    cache = jax.tree.map(paged, new_tokens(kept, *tokens))
    return [normal(int(bounds[-1]), n, width) for n in (heads, kv_heads, kv_heads)], cache, inputs


def _scope(device: Any, kernel: str) -> Any:
    placement = Placement.of(Layout(mesh={"data": 1}), [device])
    return axes.activate(axes.Scope(placement, execution=axes.Execution(kernels={"paged_attention": kernel})))


def _attend(problem: Problem, rows: Sequence[Array], cache: Cache, inputs: AttentionInputs) -> tuple[Array, Cache]:
    q, k, v = rows
    return paged_attention(
        q,
        k,
        v,
        cache,
        inputs.kv_lens,
        inputs.page_table,
        inputs.cu_q_lens,
        window=problem.window,
        soft_cap=problem.soft_cap,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
    )


def _speed(problem: Problem, device: Any, name: str, rounds: int) -> dict[str, Any]:
    progress(f"speed of paged attention by {name}: {problem}")
    with jax.default_device(device), _scope(device, name):
        rows, cache, inputs = drawn(problem, 0)
        step = _repeated(problem, rows, inputs)
        compiled = jax.jit(step, donate_argnums=1).lower(rows[0], cache).compile()
    current = [(rows[0], cache)]

    def run():
        current[0] = jax.block_until_ready(compiled(*current[0]))

    seconds = float(np.median(alternate({name: run}, rounds)[name])) / REPEATS
    queries, length = problem.lengths[0]
    moved = cost(cache, problem.heads[0], len(problem.lengths), queries, length, problem.window).bytes
    return {"gb_s": moved / seconds / 1e9}


def _repeated(problem: Problem, rows: Sequence[Array], inputs: AttentionInputs) -> Callable[..., Any]:
    """Call after call, each with the output before as its queries."""

    def step(q, cache):
        again = lambda _, carry: _attend(problem, [carry[0], *rows[1:]], carry[1], inputs)  # noqa: E731
        return lax.fori_loop(0, REPEATS, again, (q, cache))

    return step
