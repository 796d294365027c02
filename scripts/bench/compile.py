"""`axon bench compile`: the cost of tracing and compiling a deep model for TPUs, without having one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import jax

from axon.axes import Execution
from axon.layout import Layout
from axon.plan.compiled import count_instructions, device_bytes
from axon.plan.topology import devices
from axon.train.optimizers import AdamW, Cosine
from axon.train.step import Program
from models.llama import Llama
from scripts.bench.reference import LLAMA3_8B
from scripts.bench.timing import progress

TOPOLOGY = "v5e:4x4"
LAYOUT = Layout(mesh={"data": 16}, zero=3)
EXECUTION = Execution(remat="full")


def run(
    model: Llama = LLAMA3_8B,
    depths: Sequence[int] = (8, 32),
    topology: str = TOPOLOGY,
    layout: Layout = LAYOUT,
    batch: int = 16,
    seq: int = 2048,
) -> dict[str, Any]:
    """For each number of layers: seconds to `trace`, `lower` and `compile` a train step, and its `operations`.

    `lowered` counts those of the StableHLO that goes into the compiler, `operations` the HLO instructions that come
    out; `gibibytes` is what the program needs on each device. Nothing is read from a cache of compiled programs.
    """
    with _no_cache():
        return {
            "topology": topology,
            "layers": {str(n): _measure(model, n, topology, layout, batch, seq) for n in depths},
        }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    return [
        (
            f"{layers} layers on {result['topology']}",
            f"trace {one['trace']:.1f} s, lower {one['lower']:.1f} s, compile {one['compile']:.1f} s, "
            f"{one['operations']:,} HLO operations, {one['gibibytes']:.2f} GiB a device",
        )
        for layers, one in result["layers"].items()
    ]


def _measure(model: Llama, layers: int, topology: str, layout: Layout, batch: int, seq: int) -> dict[str, Any]:
    progress(f"{layers} layers for {topology}")
    optimizer = AdamW(Cosine(3e-4, 100, 1000))
    model = replace(model, layers=layers)
    begun = perf_counter()
    program = Program(model, layout, optimizer, batch=batch, seq=seq, execution=EXECUTION, devices=devices(topology))
    program.trace()
    traced = perf_counter()
    lowered = program.lower()
    lowered_at = perf_counter()
    compiled = lowered.compile()
    done = perf_counter()
    return {
        "trace": traced - begun,
        "lower": lowered_at - traced,
        "compile": done - lowered_at,
        "lowered": lowered.as_text().count(" = "),
        "operations": count_instructions(compiled.as_text()),
        "gibibytes": device_bytes(compiled) / 2**30,
    }


@contextmanager
def _no_cache() -> Iterator[None]:
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
