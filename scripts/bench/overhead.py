"""`axon bench overhead`: the framework's overhead over the same step written by hand in JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axon.layout import Layout
from axon.plan.compiled import count_instructions
from axon.plan.flops import count_jaxpr
from axon.train.optimizers import AdamW
from axon.train.step import Program, State
from models.llama import Llama
from scripts.bench import reference
from scripts.bench.bare import bare_state, make_step
from scripts.bench.host import host_seconds
from scripts.bench.timing import alternate, median_error, progress

Batch = dict[str, jax.Array]


def run(
    model: Llama = reference.MODEL,
    batch: int = reference.BATCH,
    seq: int = reference.SEQ,
    optimizer: AdamW = reference.OPTIMIZER,
    rounds: int = 31,
    host_steps: int = 500,
) -> dict[str, Any]:
    """The framework's step and the bare one in turn, `rounds` times.

    `ratio`: the median of the rounds' time ratios, framework ÷ bare. `spread`: how far from 1 that median may be by
    chance, measured on the bare step against a second compiled copy of itself in the same rounds: the distance of
    its median ratio from 1, plus twice that median's standard error. `flops_ratio`: matmul FLOPs of the two.
    `operations`: HLO instructions of the two optimised programs. `host_ms`: see `scripts.bench.host`.
    """
    program = Program(model, Layout(mesh={"data": 1}), optimizer, batch=batch, seq=seq, devices=jax.devices("cpu")[:1])
    state, placed = program.init(), program.place(reference.random_batch(0, batch, seq, model.vocab))
    progress("compiling")
    traced = {"axon": program.trace(), "bare": _trace_bare(program, model, optimizer, state, placed)}
    compiled = {name: one.lower().compile() for name, one in traced.items()}
    flops = {name: count_jaxpr(one.jaxpr.jaxpr).flops for name, one in traced.items()}
    again = _trace_bare(program, model, optimizer, state, placed).lower().compile()
    steps = {
        "axon": _stepper(compiled["axon"], (jax.tree.map(jnp.copy, state),), placed),
        "bare": _stepper(compiled["bare"], bare_state(state.parameters, model), placed),
        "again": _stepper(again, bare_state(state.parameters, model), placed),
    }
    progress(f"timing {rounds} rounds")
    seconds = alternate(steps, rounds)
    ratios, own = seconds["axon"] / seconds["bare"], seconds["again"] / seconds["bare"]
    progress(f"timing {host_steps} empty steps")
    host = host_seconds(program, state, host_steps)
    return {
        "ratio": float(np.median(ratios)),
        "spread": abs(float(np.median(own)) - 1) + 2 * median_error(own),
        "flops_ratio": flops["axon"] / flops["bare"],
        "operations": {name: count_instructions(one.as_text()) for name, one in compiled.items()},
        "host_ms": 1e3 * host,
        "axon": batch * seq / float(np.median(seconds["axon"])),
        "bare": batch * seq / float(np.median(seconds["bare"])),
        "rounds": rounds,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    operations = result["operations"]
    return [
        ("axon", f"{result['axon']:,.0f} tokens/s"),
        ("bare JAX", f"{result['bare']:,.0f} tokens/s"),
        ("time, axon ÷ bare", f"{result['ratio']:.3f}"),
        ("bare against itself", f"± {result['spread']:.3f}"),
        ("matmul FLOPs, axon ÷ bare", f"{result['flops_ratio']:.4f}"),
        ("HLO operations, axon and bare", f"{operations['axon']:,} and {operations['bare']:,}"),
        ("host, per step", f"{result['host_ms']:.2f} ms"),
    ]


def _trace_bare(program: Program, model: Llama, optimizer: AdamW, state: State, batch: Batch) -> Any:
    """Traces a new function, or an earlier compilation would be reused."""
    step = make_step(model, optimizer, program.batch, program.seq)
    return step.trace(*bare_state(state.parameters, model), batch)


def _stepper(execute: Callable[..., Any], arguments: tuple[Any, ...], batch: Batch) -> Callable[[], None]:
    """A compiled step whose next arguments are its results, all but the metrics."""
    current = [arguments]

    def step():
        *new, _ = jax.block_until_ready(execute(*current[0], batch))
        current[0] = tuple(new)

    return step
