"""The output of `axon show` on a pipeline: the table that runs, and that of each stage by itself."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from axon.axes.execution import is_policy
from axon.chips import chip_of, part
from axon.chips.chip import Chip
from axon.layout.table import Schedule
from axon.parallel.pipeline import Costs, Interleaved, Table, executed, figures, lockstep
from axon.parallel.pipeline.draw import before_and_after, draw
from axon.parallel.pipeline.execute import PIPE
from axon.parallel.pipeline.gantt import gantt, mib
from axon.parallel.pipeline.rows import SlotBytes, rows
from axon.plan.memory import IN_FLIGHT, gib
from axon.plan.predict.kernels import Kernels
from axon.plan.predict.memory import Declared, Memory, memory
from axon.plan.predict.shards import Shards
from axon.plan.slots import declared, slot_sizes, stages_of
from axon.run import Train
from axon.show.planning import own_shards
from axon.train.pipeline import MOST_CELLS
from axon.train.step import Program

COSTS = Costs()

LEAST_GAIN = 0.03
"""The share of its time by which a schedule has to be faster to be worth a word: compiled, schedules differ from what
their tables and what waits say by as much (docs/measurements.md)."""

COST_NAMES = "time in units of a stage's forward; a backward takes 2, 1 for the inputs and 1 for the weights"


def print_schedule(console: Console, tree: Train, program: Program) -> None:
    """The schedule that runs, with each stage's bubble, a device's memory by prediction, and which would be faster;
    nothing where the mesh has no stages."""
    pipeline = program.evaluator.pipeline
    if pipeline is None:
        return
    table, running = pipeline.table, _Running.of(tree, program)
    sizes = running.sizes
    heading = (
        f"pipeline: {_name(pipeline.schedule)} in lockstep, {table.stages} stages, {table.microbatches} microbatches"
    )
    text = gantt(table, COSTS, width=console.width, slot_bytes=sizes)
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
    draw(before_and_after(name, own, table, sizes), path)
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

    @staticmethod
    def of(tree: Train, program: Program) -> "_Running":
        return _Running(program, own_shards(tree, program.placement))

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
        remat = self.program.runtime.execution.remat
        time = f"{'' if is_policy(remat) else 'at most '}{self._step(self._table):,.4g}"
        return f"as executed, with remat {remat!r}, a step takes as long as {time} forwards of a stage"

    def faster(self) -> list[str]:
        """Of schedules that give the same results, and whose chunks leave no more places empty, the fastest; and the
        fastest that fits the chip, or takes no more memory than the one that runs."""
        time, room = (1 - LEAST_GAIN) * self._step(self._table), self.room
        faster = sorted((one for one in self.others if one.time < time), key=lambda one: one[:2])
        if not faster:
            return [f"no schedule without a delay is faster by {LEAST_GAIN:.0%} on this mesh"]
        best = faster[0]
        if best.memory <= room:
            return [str(best)]
        small = next((one for one in faster if one.memory <= room), None)
        what = f"more than {gib(room)} GiB, {'those of the chip' if self._chip else 'as much as now'}"
        return [f"{best}: {what}", *([f"of those with no more, {small}"] if small else [])]

    @property
    def room(self) -> float:
        """Bytes that a device may take: what the chip has, or of one that is not known what the step takes now."""
        return self._chip.memory * part(self.program.placement.devices[0]) if self._chip else self.memory.total

    @property
    def _chip(self) -> Chip | None:
        return chip_of(self.program.placement.chip)

    @property
    def _table(self) -> Table:
        return stages_of(self.program).table

    def _step(self, table: Table) -> float:
        """What a step takes, in forwards of a stage, with what remat computes again, and what lies between the parts of
        a backward written and read."""
        costs = executed(table, self._computed_again)
        return figures(
            table, replace(costs, backward_weight=costs.backward_weight + table.split * self._moved)
        ).lockstep

    @cached_property
    def _computed_again(self) -> float:
        """The share of the forward that backwards compute again."""
        remat, shards = self.program.runtime.execution.remat, self.shards
        if remat in ("none", "full") or not is_policy(remat):
            return float(remat != "none")
        periods = [(one, shards.periods(n)) for n, one in enumerate(shards.split.work.periods)]
        again = 0.0
        for n, (one, times) in enumerate(periods):
            share, of_pairs, _ = shards.split.again(n, shards.waits.computed)
            again += times * (share * (one.forward - one.attention) + of_pairs * one.attention)
        return again / sum(times * one.forward for one, times in periods)

    @cached_property
    def _moved(self) -> float:
        """Forwards of a stage for which what is left for the weights is written and read; 0 without a known chip."""
        if self._chip is None or not is_policy(self.program.runtime.execution.remat):
            return 0.0
        shards, split = self.shards, self.shards.split
        times = {n: shards.periods(n) for n in range(len(split.work.periods))}
        left = sum(times[n] * split.left(n, shards.waits.computed) for n in times)
        flops = sum(times[n] * split.flops[n] for n in times)
        return (2 * left / self._chip.bandwidth) / (flops / Kernels(self._chip).rate)

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
        return _Candidate(self._step(table), memory(shards, Declared(state, sizes)).total, schedule)

    @cached_property
    def _declared(self) -> Declared:
        """What a split schedule with a flush, of as many chunks as the one that runs, would keep."""
        table = self._table
        if not (table.split and table.flush):
            schedule = Interleaved(table.chunks.virtual, split=True)
            table = lockstep(schedule.table(table.stages, table.microbatches))
        found = declared(self.program, slot_sizes(self.program, table))
        return found._replace(state={kind: size for kind, size in found.state.items() if kind != IN_FLIGHT})
