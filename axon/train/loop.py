"""The loop around the step: feed batches, read metrics, notice a loss or gradient that is not finite."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from axon.data.feed import Feed
from axon.errors import Unavailable, UserError
from axon.train.faults import Fault, Monitor
from axon.train.replay import Replay
from axon.train.step import Program, State

Record = dict[str, Any]

BATCH, DISPATCH, READ = "waiting for batches", "dispatching steps", "waiting for metrics"
HOST_SPANS = (BATCH, DISPATCH, READ)
"""What the host does in a step, as a trace has it."""

NAMED = ("loss", "grad_norm", "learning_rate", "tokens")
"""The metrics of every step."""


class Diverged(UserError):
    """The loss or a gradient is no longer a number, or far above what it was."""


class RollBack(Exception):
    """The run is to go on from its last checkpoint, without the batches of `fault`."""

    def __init__(self, fault: Fault):
        super().__init__(f"step {fault.step}: {fault.why}")
        self.fault = fault


def _ignore(*_: Any) -> None:
    """A callback of which nothing is expected."""


@dataclass
class Loop:
    """Runs steps of a program from a given step on.

    Args:
        execute: the compiled step, `(state, batch) -> (state, metrics)`; with `Limits` after the batch where it may
            skip its update.
        feed: where batches come from, each of this process's sequences.
        log: called with the record of each step, as soon as its metrics are read.
        position: where batch k comes from, for messages.
        stop: called after each step, with how many steps late its answer may be; True ends the segment.
        tokens: real tokens seen before the first step.
        monitor: finds faults. noticed: called with each, and the paths of the gradients that are not finite.
        enter: called with what begins, "batch" or "step", and the number of the step.
        replay: what executes the steps that `Faults.replay_every` names.
        waited: seconds waited for batches so far. unavailable: why the feed has no further batch, once it has none.
    """

    program: Program
    execute: Callable[..., tuple[State, Mapping[str, Any]]]
    feed: Feed
    log: Callable[[Record], None]
    position: Callable[[int], str]
    stop: Callable[[int], bool]
    tokens: int = 0
    monitor: Monitor = field(default_factory=Monitor)
    noticed: Callable[[Fault, Sequence[str]], None] = _ignore
    enter: Callable[[str, int], None] = _ignore
    replay: Replay | None = None
    waited: float = 0.0
    unavailable: Unavailable | None = None

    def advance(self, state: State, first: int, last: int) -> tuple[State, int]:
        """Steps `first` to `last`, fewer if asked to stop or where the feed asks in vain; the new state, and the number
        of its last step.

        On return the metrics of every step have been logged, and the state may be saved: where they were not finite,
        the step was skipped. Raises `Diverged` or `RollBack` at a fault, by the monitor's policies.

        Metrics, and the processes' agreement on stopping, are read one step late, while the next step runs: reading
        them at once would leave the devices idle. Not on CPU, whose collectives cannot be queued, nor where a batch
        waits for the state.
        """
        ahead = not self.feed.sees_state
        behind = 0 if self.program.placement.platform == "cpu" or not ahead else 1
        waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._since = perf_counter()
        step, batch = first, self._batch(first + 1, state)
        while step < last and batch is not None:
            step += 1
            self.enter("step", step)
            with StepTraceAnnotation(DISPATCH, step_num=step):
                state, metrics = self._stepped(state, batch, step)
            waiting.append((step, {**metrics, **self.feed.metrics}))
            for name in _scalars(metrics) if behind else ():
                metrics[name].copy_to_host_async()
            if ahead and step < last:
                batch = self._batch(step + 1, state)
                self.enter("step", step)
            if len(waiting) > behind:
                self._read(*waiting.popleft())
            if self.stop(behind):
                break
            if not ahead and step < last:
                batch = self._batch(step + 1, state)
        while waiting:
            self._read(*waiting.popleft())
        return state, step

    def _batch(self, step: int, state: State) -> Mapping[str, Any] | None:
        """The batch of a step; None where the feed cannot draw it."""
        self.enter("batch", step)
        began = perf_counter()
        try:
            with TraceAnnotation(BATCH):
                return self.program.place(self.feed.draw(state))
        except Unavailable as error:
            self.unavailable = error
            return None
        finally:
            self.waited += perf_counter() - began

    def _stepped(self, state: State, batch: Mapping[str, Any], step: int) -> tuple[State, Mapping[str, Any]]:
        limits = [self.monitor.limits(step)] if self.monitor.faults.can_skip else []
        every = self.monitor.faults.replay_every
        if self.replay is not None and every is not None and step % every == 0:
            return self.replay(step, state, batch, *limits)
        return self.execute(state, batch, *limits)

    def _read(self, step: int, metrics: Mapping[str, Any]) -> None:
        with TraceAnnotation(READ):
            values = {name: np.asarray(metrics[name]).item() for name in _scalars(metrics)}
        seconds, self._since = perf_counter() - self._since, perf_counter()
        if (fault := self.monitor.judge(step, values)) is not None:
            self._handle(fault, np.asarray(metrics["norms"]))
        tokens = int(values["tokens"])
        self.tokens += tokens
        self.log(
            {
                "step": step,
                "loss": values["loss"],
                "tokens": self.tokens,
                "tokens_per_second": tokens / seconds,
                "step_seconds": seconds,
                "grad_norm": values["grad_norm"],
                "learning_rate": values["learning_rate"],
                **{name: value for name, value in values.items() if name not in NAMED},
            }
        )

    def _handle(self, fault: Fault, norms: np.ndarray) -> None:
        """Return only if the step was skipped."""
        bad = [path for path, norm in zip(self.program.parameters, norms, strict=True) if not isfinite(norm)]
        self.noticed(fault, bad)
        if fault.policy == "skip" and self.monitor.skip():
            return
        if fault.policy == "rollback" and self.monitor.rollbacks < self.monitor.faults.rollbacks:
            raise RollBack(fault)
        raise self._diverged(fault, bad, len(norms))

    def _diverged(self, fault: Fault, bad: Sequence[str], parameters: int) -> Diverged:
        first = f"the first gradient that is not finite is that of {bad[0]}" if bad else "every gradient is finite"
        monitor = self.monitor
        tried = {
            "stop": "Nothing was saved after it, and the same command would fail at the same step",
            "skip": f"{monitor.skips} steps were skipped, {monitor.in_a_row} of them in a row: more than Faults.skips "
            "or Faults.skips_in_a_row allows",
            "rollback": f"The run was rolled back {monitor.rollbacks} times already, which Faults.rollbacks allows",
        }[fault.policy]
        leave = "" if fault.policy == "rollback" else f", leave it out by {fault.field} = 'rollback'"
        return Diverged(
            f"step {fault.step}: {fault.why}: {first} ({len(bad)} of {parameters} parameters).\n"
            f"The batch: {self.position(fault.step - 1)}\n"
            f"{tried}. Look at that batch{leave}, or lower the learning rate or the optimizer's clip in a new "
            "--run-dir; Train.init_from starts it from the last checkpoint here"
        )


def _scalars(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics that a record has: those of every step, and those that objective and modules add."""
    return [name for name, value in metrics.items() if np.ndim(value) == 0]
