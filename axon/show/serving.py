"""The output of `axon show` on serving: bytes of weights and cache, engines, and how much each does at once."""

import math
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from axon.axes.array_spec import ArraySpec
from axon.runtime import IDENTITY_LAYERS
from axon.serve.program import ServingProgram
from axon.serve.replicas import engine_axes


def serving_totals(program: ServingProgram) -> Table:
    """Bytes of the weights, and of the pages of each engine."""
    table = Table(title="totals", title_justify="left", box=None)
    for heading in ("kind", "bytes in all", "bytes per device"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    weights, pages = program.parameters.values(), program.cached_arrays
    table.add_row("weights", f"{_bytes(weights):,}", f"{program.parameter_bytes():,}")
    table.add_row("cache", f"{_engines(program) * _bytes(pages):,}", f"{program.cache_bytes():,}")
    return table


def print_engines(console: Console, program: ServingProgram) -> None:
    """How many engines there are, and what each has and does."""
    console.print("\n".join(_lines(program)), markup=False, highlight=False, soft_wrap=True)


def _lines(program: ServingProgram) -> Iterator[str]:
    mesh, capacity, count = program.runtime.placement.mesh, program.capacity, _engines(program)
    if count == 1:
        yield f"an engine on {mesh.size} device{'s' if mesh.size > 1 else ''}"
    else:
        axes = " · ".join(engine_axes(program.runtime))
        each = f"on {mesh.size // count} devices each"
        yield f"{count} engines, one for each place along {axes}, which share the requests, {each}"
    steps = ", ".join(str(size.tokens) for size in capacity.sizes())
    yield f"up to {capacity.requests} requests of {program.length} tokens at once, in steps of {steps} tokens"
    for window, pool in program.pools.items():
        sees = "all" if window is None else f"the last {window}"
        yield f"{pool.count - 1} pages of {pool.size} tokens, for attention to {sees}"
    if program.block is not None:
        yield "the model's multi-token block guesses, with as many pages of its own"
    choices = program.runtime.choices
    yield from (f"{topic}: {choices[topic]}" for topic in ("weights", IDENTITY_LAYERS) if topic in choices)


def _engines(program: ServingProgram) -> int:
    return math.prod(program.runtime.placement.mesh.shape[axis] for axis in engine_axes(program.runtime))


def _bytes(specs: Iterable[ArraySpec]) -> int:
    return sum(spec.nbytes for spec in specs)
