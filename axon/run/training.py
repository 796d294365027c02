"""The training part of a run: compile, step, save, evaluate; skip or roll back where a step goes wrong."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from axon.checkpoint import RunStore
from axon.config import dump
from axon.data import Feed, FeedContext, Prepared
from axon.data.feed import numbered_without
from axon.errors import Unavailable
from axon.launch.agree import AgreedStop
from axon.launch.signals import Interrupts, compile_interruptibly
from axon.launch.watchdog import Watchdog
from axon.observe.events import Events
from axon.observe.journal import Journal
from axon.observe.mfu import FORMULA, mfu, peak
from axon.observe.record import memory_use
from axon.plan.out_of_memory import check_step
from axon.run.branch import PARENT
from axon.run.profiling import Profiling
from axon.run.references import REFERENCES
from axon.run.restore import IN_FLIGHT
from axon.run.saves import Saves
from axon.run.tree import Train
from axon.train.faults import Fault, Monitor
from axon.train.loop import Loop, Record, RollBack
from axon.train.replay import Differing, Replay
from axon.train.state import State
from axon.train.step import Program

MONITOR, FEED = "faults", "feed"
"""Names in `extra` of what a checkpoint keeps of faults before it, and for the feed."""


@dataclass(frozen=True)
class Position:
    """Where training is: the state, its step, and the number of tokens it was trained on."""

    state: State
    step: int
    tokens: int


@dataclass
class Training:
    """The steps of one call of `run`.

    Args:
        folder: the run's. begin: restores the position to go on from. evaluate: evaluates a state.
        evaluate_if_missing: the same, unless the metrics have it. profile: the folder for a profile of the first
            steps; None for none. parent: see `axon.run.branch`. frozen: see `axon.run.references.REFERENCES`.
    """

    train: Train
    program: Program
    corpus: Prepared
    folder: Path
    store: RunStore
    saves: Saves
    journal: Journal
    events: Events
    watchdog: Watchdog
    interrupts: Interrupts
    stop: AgreedStop
    report: Callable[[str], None]
    begin: Callable[[], Position]
    evaluate: Callable[[State], None]
    evaluate_if_missing: Callable[[State], None]
    profiling: Profiling
    parent: Mapping[str, Any] | None = None
    frozen: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, position: Position, until: int) -> State:
        """Train up to step `until`; the state after it."""
        replay = Replay(self.program, self._compiled(), self._replayed)
        placement = self.program.placement
        rate = peak(placement.devices, self.train.precision.compute_dtype(placement.platform).name)
        self.report(f"{FORMULA}; peak: {rate.source}")

        def log(record: Record) -> None:
            self.saves.look()
            self.journal.stepped(record | {"mfu": mfu(record["tokens_per_second"], self.program.flops_per_token, rate)})

        monitor = self._monitor(position.step)
        if self._evaluation_due(position.step):
            self.evaluate_if_missing(position.state)  # the last call was stopped between saving and evaluating
        while True:
            try:
                return self._trained(position, until, replay, log, monitor)
            except RollBack as error:
                fault = error.fault
            del position  # two states may be more than fits in memory
            position, monitor = self._rolled_back(fault, monitor)

    def _compiled(self) -> Any:
        with self.watchdog.during("compile"):
            began = time.monotonic()
            self.events.record("compile_begin")
            lowered = self.program.lower()
            for topic, choice in self.program.choices.items():
                self.report(f"{topic}: {choice}")
            execute = compile_interruptibly(lowered.compile, self.interrupts)
            self.events.record("compile_end", seconds=_since(began))
            check_step(self.program, execute)
            self.profiling.begin(execute)
        return self.program.executed(execute)

    def _monitor(self, step: int) -> Monitor:
        monitor = Monitor.restored(self.train.faults, self._kept(step, MONITOR))
        if monitor.left_out:
            self.report(f"left out since rollbacks: batches {', '.join(map(str, monitor.left_out))}")
        return monitor

    def _kept(self, step: int, name: str) -> Mapping[str, Any]:
        """What the checkpoint of a step keeps by this name."""
        return self.store.of_step(step).extra(step).get(name, {}) if step and self.store.latest() is not None else {}

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _trained(self, start: Position, until: int, replay: Replay, log: Any, monitor: Monitor) -> State:
        program, seed, left_out = self.program, self.train.seed, monitor.left_out
        saved = self._kept(start.step, FEED)
        context = FeedContext(
            seed,
            program.runtime,
            start.step,
            program.host_sequences,
            left_out,
            saved,
            self.train.objective,
            program.references,
            self.report,
            self.folder,
        )
        with self.corpus.feed(context) as feed, self.profiling:
            loop = Loop(
                program,
                replay.execute,
                feed,
                log,
                lambda step: self.corpus.position(seed, self._batch(step, left_out)),
                self.stop.ask,
                start.tokens,
                monitor,
                lambda fault, paths: self._noticed(fault, paths, left_out),
                self.watchdog.enter,
                replay,
            )
            state, step = start.state, start.step
            for end in self._segments(step, until):
                with self.profiling.during(step, end):
                    state, step = self._segment(loop, state, step, end)
                at = Position(state, step, loop.tokens)
                self._save(at, until, monitor, feed, loop.unavailable)
                self.stop.check()
                if self._evaluation_due(step) and step < until:
                    self._evaluate(at, until, monitor, feed)
            return state

    def _evaluate(self, at: Position, until: int, monitor: Monitor, feed: Feed) -> None:
        try:
            self.evaluate(at.state)
        except Unavailable as error:
            self._save(at, until, monitor, feed, error)

    def _segment(self, loop: Loop, state: State, first: int, last: int) -> tuple[State, int]:
        began, waited = time.monotonic(), loop.waited
        state, step = loop.advance(state, first, last)
        data = round(loop.waited - waited, 6)
        self.watchdog.enter("between steps", step)
        self.events.record(
            "steps", step, first=first + 1, seconds=_since(began), data_seconds=data, memory=memory_use()
        )
        return state, step

    def _batch(self, step: int, left_out: Sequence[int]) -> int:
        """The number of the batch that step `step` + 1 finishes."""
        return numbered_without(step - bool(self.program.in_flight), left_out)

    def _segments(self, start: int, until: int) -> Iterator[int]:
        """The steps after which anything besides training is due, the last one included."""
        checkpoints, profiled = self.train.checkpoints, self.profiling.borders
        for step in range(start + 1, until + 1):
            saved = checkpoints.due(step) or checkpoints.due_locally(step)
            if step == until or step in profiled or saved or self._evaluation_due(step):
                yield step

    def _evaluation_due(self, step: int) -> bool:
        evaluation = self.train.evaluation
        return evaluation is not None and step % evaluation.every == 0 and (step > 0 or evaluation.at_start)

    def _save(
        self, at: Position, until: int, monitor: Monitor, feed: Feed, unavailable: Unavailable | None = None
    ) -> None:
        """Save what is due, and where the run ends here, and say so. Raises `unavailable`."""
        asked = self.stop.requested
        ends = asked is not None or unavailable is not None
        with self.watchdog.during("save", at.step):
            checkpoints = self.train.checkpoints
            durable = checkpoints.due(at.step) or at.step == until or ends
            if durable or checkpoints.due_locally(at.step):
                extra = {"tokens": at.tokens, "seed": self.train.seed, "mesh": self.program.update.mesh}
                extra |= {IN_FLIGHT: self.program.in_flight} if self.program.in_flight else {}
                extra |= {REFERENCES: dict(self.frozen)} if self.frozen else {}
                extra |= {MONITOR: saved} if (saved := monitor.saved()) else {}
                extra |= {FEED: saved} if (saved := feed.saved()) else {}
                extra |= {"config": dump(self.train)} | ({PARENT: self.parent} if self.parent else {})
                self.saves.save(at.step, at.state, extra, self.program.specs, durable)
            if ends:
                self.events.record("stop", at.step, **({} if asked is None else {"signal": asked}))
                self.saves.wait()
                self.report(f"saved step {at.step} in {self.store.directory}; the same command continues from there")
        if unavailable is not None:
            raise unavailable

    # ---- faults ---------------------------------------------------------------------------------------------------

    def _replayed(self, step: int, seconds: float, differing: Differing) -> None:
        arrays = {path: list(devices) for path, devices in list(differing.items())[:10]}
        self.events.record("replay", step, seconds=round(seconds, 6), differing=len(differing), arrays=arrays)

    def _noticed(self, fault: Fault, paths: Sequence[str], left_out: Sequence[int]) -> None:
        batch = self._batch(fault.step - 1, left_out)
        where = {"batch": batch, "documents": self.corpus.documents(self.train.seed, batch)}
        numbers = {"loss": fault.loss, "grad_norm": fault.grad_norm, "policy": fault.policy}
        self.events.record(fault.kind, fault.step, **numbers, parameters=list(paths[:10]), **where)
        if fault.policy == "skip":
            self.events.record("skip", fault.step)
            self.report(f"step {fault.step} is skipped: {fault.why}. {self.corpus.position(self.train.seed, batch)}")

    def _rolled_back(self, fault: Fault, monitor: Monitor) -> tuple[Position, Monitor]:
        """The last checkpoint's position, or the first of all, and the monitor for going on from there."""
        self.watchdog.enter("restore", fault.step)
        self.saves.wait()
        position = self.begin()
        bad = [self._batch(step, monitor.left_out) for step in range(position.step, fault.step)]
        bad = bad[-self.train.faults.leave_out :]
        monitor = replace(
            self._monitor(position.step),
            left_out=tuple(sorted({*monitor.left_out, *bad})),
            rollbacks=monitor.rollbacks + 1,
        )
        lost = self.journal.roll_back(position.step)
        self.events.record("rollback", position.step, at=fault.step, left_out=bad, **lost_time(lost))
        self.report(
            f"step {fault.step}: {fault.why}. Rolled back to step {position.step}, to go on without batch"
            f"{'es' if len(bad) > 1 else ''} {', '.join(map(str, bad))} of seed {self.train.seed}"
        )
        return position, monitor


def lost_time(dropped: Sequence[Record]) -> dict[str, Any]:
    """How many steps are done again, and how long they took, by their records."""
    steps = [record for record in dropped if "step_seconds" in record]
    return {"lost_steps": len(steps), "lost_seconds": round(sum(r["step_seconds"] for r in steps), 3)}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 6)
