"""The output of `axon show` on a pipeline: the table that runs, and that of each stage by itself."""

import math
from pathlib import Path

import jax
from rich.console import Console

from axon.axes import ArraySpec
from axon.nn import Inputs
from axon.parallel.pipeline import Costs, OneFOneB, Table, figures, lockstep, recomputing
from axon.parallel.pipeline.draw import before_and_after, draw
from axon.parallel.pipeline.execute import PIPE
from axon.parallel.pipeline.gantt import gantt, mib
from axon.parallel.pipeline.rows import rows
from axon.runtime import nested
from axon.train.pipelined import Pipeline
from axon.train.step import Program

COSTS = Costs()
COST_NAMES = "time in units of a stage's forward; a backward takes 2, 1 for the inputs and 1 for the weights"


def print_schedule(console: Console, program: Program) -> None:
    """The schedule that runs, with each stage's bubble and memory; nothing where the mesh has no stages."""
    pipeline = program.evaluator.pipeline
    if pipeline is None:
        return
    table, size = pipeline.table, input_bytes(program)
    heading = f"pipeline: {_name(pipeline)} in lockstep, {table.stages} stages, {table.microbatches} microbatches"
    text = gantt(table, COSTS, width=console.width, slot_bytes=size)
    lines = [heading, text.rstrip("\n"), COST_NAMES, _time(table), _reserved(table, size)]
    if table.microbatches < table.stages:
        lines.append(
            f"with {table.microbatches} microbatches {table.stages - table.microbatches} of {table.stages} stages are "
            f"idle at any time: the more microbatches, the smaller the bubble (Layout.microbatches)"
        )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def draw_schedule(program: Program, picture: Path) -> Path | None:
    """Draw the schedule that runs below its own table, into `FILE-schedule.png` for `FILE.png`; the path.

    None where the mesh has no stages. Raises `UserError` for a format that does not exist.
    """
    pipeline = program.evaluator.pipeline
    if pipeline is None:
        return None
    table, size, name = pipeline.table, input_bytes(program), _name(pipeline)
    own = pipeline.schedule.table(table.stages, table.microbatches)
    path = picture.with_stem(f"{picture.stem}-schedule")
    draw(before_and_after(name, own, table, size), path)
    return path


def input_bytes(program: Program) -> int:
    """Bytes of a chunk's input on one device: the stream of one microbatch between two blocks."""
    runtime = program.runtime
    shape = program.batch // runtime.layout.microbatches, program.seq
    tokens = ArraySpec(("batch", "seq"), shape, "int32")

    def stream(values: dict, tokens: jax.Array) -> jax.Array:
        return runtime.bind(values).embed(Inputs(tokens, positions=tokens))

    with runtime.tracing():
        found = jax.eval_shape(stream, runtime.abstract(nested(runtime.parameters)), runtime.abstract(tokens))
    return found.dtype.itemsize * math.prod(found.sharding.shard_shape(found.shape))


def _name(pipeline: Pipeline) -> str:
    """As a config writes it, with what is chosen: `Interleaved(virtual=2)`."""
    return repr(pipeline.schedule).removesuffix("()")


def _time(table: Table) -> str:
    """What a step takes with what stages compute again, next to the default schedule where that is faster."""
    plain = lockstep(OneFOneB().table(table.stages, table.microbatches))
    ours, other = (figures(one, recomputing(one)).lockstep for one in (table, plain))
    text = f"with what backwards compute again a step takes as long as {ours:,g} forwards of a stage"
    return f"{text}; OneFOneB would take {other:,g}" if other < ours else text


def _reserved(table: Table, size: int) -> str:
    """What one program for all stages makes of the most that any stage keeps."""
    _, pools = rows(table)
    return (
        f"every device along {PIPE!r} reserves as much as the stage that keeps most: {pools.inputs} inputs, "
        f"{pools.gradients} gradients and one of each on its way, {mib(size)} each, "
        f"{mib((pools.inputs + pools.gradients + 2) * size)} in all"
    )
