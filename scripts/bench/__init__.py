"""Measurements: `axon bench NAME`. Each benchmark is a function that runs and returns a dict fit for JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from axon.errors import UserError, suggest
from axon.launch.host import keep_freed_memory

Result = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A module with `run() -> Result` and `rows(result) -> list of (what, figure)`, and what it measures.

    `of_training`: it runs training steps, with the same settings of the allocator as `axon train`.
    """

    module: str
    about: str
    of_training: bool = False


BENCHMARKS = {
    "train": Benchmark("scripts.bench.train", "one training step on CPU, against torch's", of_training=True),
    "overhead": Benchmark("scripts.bench.overhead", "the framework's step against bare JAX's", of_training=True),
    "data": Benchmark("scripts.bench.data", "tokens through the whole data pipeline"),
    "compile": Benchmark("scripts.bench.compile", "tracing and compiling llama3_8b for TPUs, by depth"),
    "checkpoint": Benchmark("scripts.bench.checkpoint", "saving and restoring, against the disk"),
    "import": Benchmark("scripts.bench.importing", "a model of Hugging Face's onto a device, and into a checkpoint"),
    "serve": Benchmark("scripts.bench.serve", "many requests at once, against transformers", of_training=True),
    "plan": Benchmark("scripts.bench.plan", "seconds of layouts on 8 CPU devices, as planned and as they are"),
    "collectives": Benchmark("scripts.bench.collectives", "collectives over the devices here, and their links"),
    "kernels": Benchmark("scripts.bench.kernels", "our kernels on this CPU against plain JAX"),
}


def run(name: str) -> Result:
    """Run a benchmark; progress goes to stderr. Raises `UserError` for a name that does not exist."""
    benchmark = _find(name)
    if benchmark.of_training:
        keep_freed_memory()
    return import_module(benchmark.module).run()


def show(name: str, result: Result) -> None:
    """Print a benchmark's result as a table."""
    from rich.console import Console
    from rich.table import Table

    benchmark = _find(name)
    table = Table(title=f"{name}: {benchmark.about}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    rows: Sequence[tuple[str, str]] = import_module(benchmark.module).rows(result)
    for what, figure in rows:
        table.add_row(what, figure)
    Console().print(table)


def _find(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UserError(f"axon bench: unknown benchmark {name!r}.{suggest(name, BENCHMARKS)}")
    return BENCHMARKS[name]
