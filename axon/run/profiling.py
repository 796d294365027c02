"""Tracing some steps of a run: `profile/` in the run's folder, the trace and what is needed to read it."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import jax

from axon.disk import reading, writing
from axon.errors import UserError
from axon.foreign_json import read_json
from axon.plan.compiled import memory_parts
from axon.plan.flops import flops_by_module
from axon.plan.profile import StepProfile
from axon.plan.profile.beside import beside
from axon.plan.profile.tables import Table, tables
from axon.train.step import Program

FIRST_STEPS = 5
"""How many steps are traced where none are named: the first of a start."""

FOLDER, TEXT, FACTS = "profile", "step.hlo.gz", "step.json"

Steps = tuple[int, int]
"""The first and the last of the steps that are traced."""

Asked = bool | Steps
"""What a person asks to be traced: nothing, the first steps of this start, or these."""


@dataclass(frozen=True)
class TracedStep:
    """What is known of the traced steps besides their trace; FLOPs and bytes are those of one device and one step.

    Args:
        first, last: the steps. mesh: axis → size. platform, chip: of the devices, as JAX names them. flops: of the
            traced program, by module. model_flops: by `axon.observe.mfu.FORMULA`. memory: see `memory_parts`.
    """

    first: int
    last: int
    mesh: dict[str, int]
    platform: str
    chip: str
    flops: dict[str, float]
    model_flops: float
    memory: dict[str, int]


def check_profiled(asked: Asked, until: int) -> None:
    """Raise `UserError` for steps that a run up to step `until` does not have."""
    if isinstance(asked, bool):
        return
    first, last = asked
    named = f"--profile {first}:{last}"
    if first > last:
        raise UserError(f"{named} has no steps: the first comes after the last. Write --profile {last}:{first}")
    if first < 1:
        raise UserError(f"{named}: the first step of a run is 1")
    if last > until:
        raise UserError(f"{named}: this run ends at step {until}. Name steps up to that, or raise Train.steps, --steps")


def steps_to_trace(asked: Asked, start: int, until: int) -> Steps | None:
    """The steps to trace of a run that continues from step `start`, where `asked` is True its first. Raises `UserError`
    for steps that have been done."""
    if isinstance(asked, bool):
        return (start + 1, min(start + FIRST_STEPS, until)) if asked else None
    if asked[0] <= start:
        raise UserError(
            f"--profile {asked[0]}:{asked[1]}: the run continues from step {start}, so step {asked[0]} is not done "
            f"again. Name steps from {start + 1} on"
        )
    return asked


@dataclass
class Profiling:
    """Traces `steps` of a run into `folder`, whatever else comes between them; None traces nothing. A context manager.

    `report`: called with a line when that is done.
    """

    folder: Path
    steps: Steps | None
    program: Program
    report: Callable[[str], None]
    _running: bool = field(default=False, init=False)

    @property
    def borders(self) -> tuple[int, ...]:
        """The steps after which tracing begins or ends."""
        return () if self.steps is None else (self.steps[0] - 1, self.steps[1])

    def begin(self, compiled: Any) -> None:
        """Write what is known of the step. To be called once the program is compiled, before any step."""
        if self.steps is None:
            return
        program, placement = self.program, self.program.placement
        devices = len(placement.devices)
        flops = {path: total / devices for path, total in flops_by_module(program.trace().jaxpr.jaxpr).items()}
        model = program.flops_per_token * program.batch * program.seq / devices
        mesh, memory = dict(placement.mesh.shape), memory_parts(compiled)
        facts = TracedStep(*self.steps, mesh, placement.platform, placement.chip, flops, model, memory)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FACTS).write_text(json.dumps(asdict(facts)), "utf-8")
            (self.folder / TEXT).write_bytes(gzip.compress(compiled.as_text().encode()))

    @contextmanager
    def during(self, start: int, end: int) -> Iterator[None]:
        """Around steps `start` + 1 to `end`, none of which the traced ones begin or end within."""
        if self.steps is not None and start + 1 == self.steps[0]:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would take a share of the step of its own
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._running = True
        yield
        if self._running and self.steps is not None and end == self.steps[1]:
            self._stop()
            self.report(f"profile of steps {self.steps[0]} to {end}: {self.folder}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()


def read_profile(folder: Path) -> tuple[TracedStep, StepProfile]:
    """What `Profiling` has left in `folder`. Raises `UserError` where that is none."""
    facts, text = folder / FACTS, folder / TEXT
    if not facts.is_file() or not text.is_file():
        raise UserError(
            f"{folder} has no profile: {FACTS} and {TEXT} are expected. `axon profile CONFIG` makes one, and "
            "`axon train CONFIG --profile FIRST:LAST` within a run"
        )
    step = TracedStep(**read_json(facts))
    with reading(text):
        program = gzip.decompress(text.read_bytes()).decode()
    return step, StepProfile.read(folder, program, step.last - step.first + 1, step.mesh)


def profile_tables(folder: Path) -> list[Table]:
    """The tables of the profile in `folder`, without a prediction; none where there is none. As `read_profile`."""
    if not (folder / FACTS).is_file():
        return []
    facts, profile = read_profile(folder)
    return tables(profile, beside(profile, None), facts.flops, facts.memory)
