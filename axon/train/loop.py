"""The loop around the step: feed batches, read metrics, stop at a loss or gradient that is not finite."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np

from axon.errors import UserError
from axon.train.step import Program, State

Record = dict[str, Any]

NAMED = ("loss", "grad_norm", "learning_rate", "tokens")
"""The metrics of every step."""


class Diverged(UserError):
    """The loss or a gradient is no longer a number."""


@dataclass
class Loop:
    """Runs steps of a program from a given step on.

    Args:
        execute: the compiled step, `(state, batch) -> (state, metrics)`.
        feed: the next batch, placed on the mesh.
        log: called with the record of each step, as soon as its metrics are read.
        position: where batch k comes from, for messages.
        stop: called after each step, with how many steps late its answer may be; True ends the segment.
        tokens: real tokens seen before the first step.
    """

    program: Program
    execute: Callable[[State, Mapping[str, Any]], tuple[State, Mapping[str, Any]]]
    feed: Callable[[], Mapping[str, Any]]
    log: Callable[[Record], None]
    position: Callable[[int], str]
    stop: Callable[[int], bool]
    tokens: int = 0

    def advance(self, state: State, first: int, last: int) -> tuple[State, int]:
        """Steps `first` to `last`, fewer if asked to stop; the new state, and the number of its last step.

        On return the metrics of every step have been logged and were finite, so the state may be saved. Metrics, and
        the processes' agreement on stopping, are read one step late, while the next step runs: reading them at once
        would leave the devices idle. Not on CPU, whose collectives cannot be queued.
        """
        behind = 0 if self.program.placement.platform == "cpu" else 1
        waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._since = perf_counter()
        step, batch = first, self.feed()
        while step < last:
            state, metrics = self.execute(state, batch)
            step += 1
            waiting.append((step, metrics))
            for name in _scalars(metrics) if behind else ():
                metrics[name].copy_to_host_async()
            if step < last:
                batch = self.feed()
            if len(waiting) > behind:
                self._read(*waiting.popleft())
            if self.stop(behind):
                break
        while waiting:
            self._read(*waiting.popleft())
        return state, step

    def _read(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = {name: np.asarray(metrics[name]).item() for name in _scalars(metrics)}
        seconds, self._since = perf_counter() - self._since, perf_counter()
        if not (isfinite(values["loss"]) and isfinite(values["grad_norm"])):
            raise self._diverged(step, values, np.asarray(metrics["norms"]))
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

    def _diverged(self, step: int, values: Mapping[str, float], norms: np.ndarray) -> Diverged:
        bad = [path for path, norm in zip(self.program.parameters, norms, strict=True) if not isfinite(norm)]
        first = f"the first gradient that is not finite is that of {bad[0]}" if bad else "every gradient is finite"
        return Diverged(
            f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}: {first} "
            f"({len(bad)} of {len(norms)} parameters).\n"
            f"The batch: {self.position(step - 1)}\n"
            "Nothing was saved after it, and the same command would fail at the same step. Look at that batch, or "
            "lower the learning rate or the optimizer's clip in a new --run-dir; Train.init_from starts it from the "
            "last checkpoint here"
        )


def _scalars(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics that a record has: those of every step, and those that objective and modules add."""
    return [name for name, value in metrics.items() if np.ndim(value) == 0]
