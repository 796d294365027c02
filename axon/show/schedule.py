"""The output of `axon show` on a pipeline: the table that runs, and that of each stage by itself."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from axon.layout.table import Schedule
from axon.parallel.pipeline import Costs, Interleaved, Table, executed, figures, lockstep
from axon.parallel.pipeline.draw import before_and_after, draw
from axon.parallel.pipeline.execute import PIPE, SlotBytes
from axon.parallel.pipeline.gantt import gantt, mib
from axon.parallel.pipeline.rows import rows
from axon.plan.memory import IN_FLIGHT, gib
from axon.plan.predict.memory import Declared, Memory, memory
from axon.plan.predict.shards import Shards
from axon.plan.slots import declared, slot_sizes, stages_of
from axon.run import Train
from axon.show.planning import own_shards
from axon.train.pipeline import MOST_CELLS
from axon.train.step import Program

COSTS = Costs()
COST_NAMES = "time in units of a stage's forward; a backward takes 2, 1 for the inputs and 1 for the weights"


def print_schedule(console: Console, tree: Train, program: Program) -> None:
    """The schedule that runs, with each stage's bubble, a device's memory by prediction, and which would be faster;
    nothing where the mesh has no stages."""
    pipeline = program.evaluator.pipeline
    if pipeline is None:
        return
    table, running = pipeline.table, _Running(program, own_shards(tree, program.placement))
    sizes = running.sizes
    heading = (
        f"pipeline: {_name(pipeline.schedule)} in lockstep, {table.stages} stages, {table.microbatches} microbatches"
    )
    text = gantt(table, COSTS, width=console.width, slot_bytes=sizes.stream + sizes.residuals)
    lines = [heading, text.rstrip("\n"), COST_NAMES, running.time_taken, _reserved(table, sizes), running.memory_taken]
    lines.extend(running.faster())
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


def _reserved(table: Table, sizes: SlotBytes) -> str:
    """What one program for all stages makes of the most that any stage keeps."""
    _, pools = rows(table)
    left = f", each with {mib(sizes.left)} for that of the weights" if table.split else ""
    hosted = f" and {mib(sizes.offloaded)} in the host's memory" if sizes.offloaded else ""
    return (
        f"every device along {PIPE!r} reserves as much as the stage that keeps most: {pools.inputs} inputs of "
        f"{mib(sizes.stream)}, each with {mib(sizes.residuals)}{hosted} that its backward needs, {pools.gradients} "
        f"gradients of {mib(sizes.stream)}{left}, and one of each on its way: {mib(sizes.total(pools))} in all"
    )


class _Candidate(NamedTuple):
    time: float
    memory: float
    schedule: Schedule

    def __str__(self) -> str:
        return f"{_name(self.schedule)} would take {self.time:,g}, and {gib(self.memory)} GiB of each device"


@dataclass(frozen=True)
class _Running:
    """The schedule that runs, and the planner's `shards` of its step."""

    program: Program
    shards: Shards

    @cached_property
    def sizes(self) -> SlotBytes:
        return slot_sizes(self.program)

    @cached_property
    def memory(self) -> Memory:
        return memory(self.shards, declared(self.program, self.sizes))

    @property
    def memory_taken(self) -> str:
        """What a device takes, by the planner's model of memory."""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.memory.parts.items())
        return f"by prediction a step takes {gib(self.memory.total)} GiB of each device: {parts}"

    @property
    def time_taken(self) -> str:
        """What a step takes as it is executed."""
        times = " to ".join(f"{time:,g}" for time in self._steps(self._table))
        remat = self.program.runtime.execution.remat
        return f"as executed, with remat {remat!r}, a step takes as long as {times} forwards of a stage"

    def faster(self) -> list[str]:
        """Of schedules that give the same results, and whose chunks leave no more places empty, the fastest; and the
        fastest that takes no more memory than the one that runs."""
        time = max(self._steps(self._table))
        faster = sorted((one for one in self.others if one.time < time), key=lambda one: one[:2])
        if not faster:
            return ["no schedule without a delay is faster on this mesh"]
        words, total = [str(faster[0])], self.memory.total
        if faster[0].memory > total and (small := next((one for one in faster if one.memory <= total), None)):
            words.append(f"of those with no more than now, {gib(total)} GiB, {small}")
        return words

    @property
    def _table(self) -> Table:
        return stages_of(self.program).table

    def _steps(self, table: Table) -> list[float]:
        """What a step takes, in forwards of a stage: with what remat computes again, at least and at most."""
        remat = self.program.runtime.execution.remat
        shares = {"none": [0.0], "full": [1.0]}.get(remat, [0.0, 1.0]) if isinstance(remat, str) else [0.0, 1.0]
        return [figures(table, executed(table, share)).lockstep for share in shares]

    @cached_property
    def others(self) -> list[_Candidate]:
        """`Interleaved` with each number of chunks that leaves no more places empty, with whole and split backwards."""
        pipeline, table = stages_of(self.program), self._table
        idle = pipeline.idle_share(pipeline.partition)
        most = sum(span.times for span in self.program.module.layers.spans) // table.stages
        most = min(most, MOST_CELLS // (2 * table.stages * table.microbatches))
        chunks = [v for v in range(1, most + 1) if pipeline.idle_share(pipeline.cut(v * table.stages)) <= idle]
        return [self._other(Interleaved(v, split)) for v in chunks for split in (False, True)]

    def _other(self, schedule: Interleaved) -> _Candidate:
        table = lockstep(schedule.table(self._table.stages, self._table.microbatches))
        state, of_chunk = self._declared
        share = self._table.chunks.virtual / schedule.virtual
        stream, left = of_chunk.stream, of_chunk.left * share if schedule.split else 0.0
        residuals = max(0.0, (of_chunk.residuals + stream) * share - stream)  # of each layer but the first its input
        sizes = SlotBytes(stream, residuals, left, of_chunk.offloaded * share)
        shards = replace(self.shards, layout=replace(self.shards.layout, schedule=schedule))
        return _Candidate(max(self._steps(table)), memory(shards, Declared(state, sizes)).total, schedule)

    @cached_property
    def _declared(self) -> Declared:
        """What a split schedule with a flush, of as many chunks as the one that runs, would keep."""
        table = self._table
        if not (table.split and table.flush):
            schedule = Interleaved(table.chunks.virtual, split=True)
            table = lockstep(schedule.table(table.stages, table.microbatches))
        found = declared(self.program, slot_sizes(self.program, table))
        return found._replace(state={kind: size for kind, size in found.state.items() if kind != IN_FLIGHT})
