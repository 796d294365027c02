"""The progress of a run: a live line on a terminal, a line every few seconds in a file."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar


@dataclass(frozen=True)
class Status:
    """A step's numbers, as shown. `mfu` is a fraction of 1, or None where the hardware's peak is not known; `losses`:
    of each adapter, by name, where several are trained at once."""

    step: int
    loss: float
    tokens_per_second: float
    mfu: float | None
    losses: Mapping[str, float] = field(default_factory=dict)

    def text(self, remaining: float | None) -> str:
        """Loss, tokens/s, MFU in percent, and `remaining` seconds as the time left."""
        of_each = [f"{name} {loss:.4f}" for name, loss in self.losses.items()]
        parts = [f"loss {self.loss:.4f}", *of_each, f"{self.tokens_per_second:,.0f} tok/s"]
        parts += [] if self.mfu is None else [f"MFU {100 * self.mfu:.1f} %"]
        parts += [] if remaining is None else [f"ETA {duration(remaining)}"]
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:25:45`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Shows the progress of a run of `steps` steps on `stream`. A context manager.

    On a terminal, one line that is always up to date; elsewhere a line at the first and last step and every `seconds`
    in between.
    """

    def __init__(
        self,
        steps: int,
        stream: TextIO | None = None,
        seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._steps, self._seconds, self._clock = steps, seconds, clock
        self._console = Console(file=stream or sys.stdout, soft_wrap=True, highlight=False)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._task = self._bar.add_task("", total=steps, text="") if self._bar else None
        self._last: tuple[int, float] | None = None
        self._per_step: float | None = None
        self._shown = -float("inf")

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        mfu: float | None = None,
        losses: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Step `step` of `steps` is done; takes well under a millisecond."""
        now = self._clock()
        self._measure(step, now)
        remaining = None if self._per_step is None else self._per_step * (self._steps - step)
        text = Status(step, loss, tokens_per_second, mfu, losses).text(remaining)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif step >= self._steps or now - self._shown >= self._seconds:
            self._shown = now
            self.print_line(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}")

    def print_line(self, text: str) -> None:
        """Print `text` above the live line."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._bar is not None:
            self._bar.stop()

    def _measure(self, step: int, now: float) -> None:
        """Seconds per step, as a moving average over about ten. Compilation, before the first update, is left out."""
        if self._last is not None and step > self._last[0]:
            took = (now - self._last[1]) / (step - self._last[0])
            self._per_step = took if self._per_step is None else 0.9 * self._per_step + 0.1 * took
        self._last = (step, now)


def _bar(console: Console) -> Bar:
    count = TextColumn("step {task.completed:,.0f}/{task.total:,.0f}")
    return Bar(count, BarColumn(bar_width=12), TextColumn("{task.fields[text]}"), console=console)
