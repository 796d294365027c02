"""The output of `axon show` on a pipeline: the table that runs, and that of each stage by itself."""

from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from axon.layout.table import Schedule
from axon.parallel.pipeline import Costs, Interleaved, Table, executed, figures, lockstep
from axon.parallel.pipeline.draw import before_and_after, draw
from axon.parallel.pipeline.execute import PIPE, SlotBytes
from axon.parallel.pipeline.gantt import gantt, mib
from axon.parallel.pipeline.rows import rows
from axon.plan.slots import slot_sizes, stages_of
from axon.train.pipelined import MOST_CELLS
from axon.train.step import Program

COSTS = Costs()
COST_NAMES = "time in units of a stage's forward; a backward takes 2, 1 for the inputs and 1 for the weights"


def print_schedule(console: Console, program: Program) -> None:
    """The schedule that runs, with each stage's bubble and memory, and which would be faster; nothing where the mesh
    has no stages."""
    pipeline = program.evaluator.pipeline
    if pipeline is None:
        return
    table, sizes = pipeline.table, slot_sizes(program)
    heading = (
        f"pipeline: {_name(pipeline.schedule)} in lockstep, {table.stages} stages, {table.microbatches} microbatches"
    )
    text = gantt(table, COSTS, width=console.width, slot_bytes=sizes.stream + sizes.residuals)
    lines = [heading, text.rstrip("\n"), COST_NAMES, _time(program), _reserved(table, sizes), *_faster(program, sizes)]
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
    table, sizes, name = pipeline.table, slot_sizes(program), _name(pipeline.schedule)
    own = pipeline.schedule.table(table.stages, table.microbatches)
    path = picture.with_stem(f"{picture.stem}-schedule")
    draw(before_and_after(name, own, table, sizes.stream + sizes.residuals), path)
    return path


def _name(schedule: Schedule) -> str:
    """As a config writes it, with what is chosen: `Interleaved(virtual=2, split=False)`."""
    return repr(schedule).removesuffix("()")


def _steps(program: Program, table: Table) -> list[float]:
    """What a step takes, in forwards of a stage: with what remat computes again, at least and at most."""
    remat = program.runtime.execution.remat
    shares = {"none": [0.0], "full": [1.0]}.get(remat, [0.0, 1.0]) if isinstance(remat, str) else [0.0, 1.0]
    return [figures(table, executed(table, share)).lockstep for share in shares]


def _time(program: Program) -> str:
    """What a step takes as it is executed."""
    times = " to ".join(f"{time:,g}" for time in _steps(program, stages_of(program).table))
    remat = program.runtime.execution.remat
    return f"as executed, with remat {remat!r}, a step takes as long as {times} forwards of a stage"


def _reserved(table: Table, sizes: SlotBytes) -> str:
    """What one program for all stages makes of the most that any stage keeps."""
    _, pools = rows(table)
    left = f", each with {mib(sizes.left)} for that of the weights" if table.split else ""
    return (
        f"every device along {PIPE!r} reserves as much as the stage that keeps most: {pools.inputs} inputs of "
        f"{mib(sizes.stream)}, each with {mib(sizes.residuals)} that its backward needs, {pools.gradients} gradients "
        f"of {mib(sizes.stream)}{left}, and one of each on its way: {mib(sizes.total(pools))} in all"
    )


class _Candidate(NamedTuple):
    time: float
    memory: int
    schedule: Schedule

    def __str__(self) -> str:
        return f"{_name(self.schedule)} would take {self.time:,g}, with {mib(self.memory)} of slots"


def _faster(program: Program, sizes: SlotBytes) -> list[str]:
    """Of schedules that give the same results, and whose chunks leave no more places empty, the fastest; and the
    fastest whose slots take no more memory than those of the one that runs."""
    pipeline = stages_of(program)
    table = pipeline.table
    virtual, microbatches = table.chunks.virtual, table.microbatches
    of = sizes
    if not (table.split and table.flush):
        of = slot_sizes(program, lockstep(Interleaved(virtual, split=True).table(table.stages, microbatches)))
    idle = pipeline.idle_share(pipeline.partition)
    most = sum(span.times for span in program.module.layers.spans) // table.stages
    most = min(most, MOST_CELLS // (2 * table.stages * microbatches))
    chunks = [v for v in range(1, most + 1) if pipeline.idle_share(pipeline.cut(v * table.stages)) <= idle]
    found = []
    for schedule in (Interleaved(v, split) for v in chunks for split in (False, True)):
        one = lockstep(schedule.table(table.stages, microbatches))
        share = virtual / schedule.virtual
        own = SlotBytes(of.stream, int(of.residuals * share), int(of.left * share))
        found.append(_Candidate(max(_steps(program, one)), own.total(rows(one)[1]), schedule))
    time, memory = max(_steps(program, table)), sizes.total(rows(table)[1])
    faster = sorted((one for one in found if one.time < time), key=lambda one: one[:2])
    if not faster:
        return ["no schedule without a delay is faster on this mesh"]
    words = [str(faster[0])]
    if faster[0].memory > memory and (small := next((one for one in faster if one.memory <= memory), None)):
        words.append(f"of those with no more than now, {mib(memory)}, {small}")
    return words
