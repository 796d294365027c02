"""`axon profile`: a traced step beside its prediction, as tables and as JSON."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from axon.chips import Chip, chips, known
from axon.chips.target import Target
from axon.disk import writing
from axon.errors import UserError
from axon.layout import Placement
from axon.observe.page import profile_page
from axon.plan.predict.seconds import Seconds, seconds
from axon.plan.profile import StepProfile
from axon.plan.profile.beside import beside
from axon.plan.profile.tables import json_of, tables
from axon.plan.this_cpu import CPU, this_cpu
from axon.run import Train, program
from axon.run.profiling import TracedStep
from axon.show.plan import empty_table
from axon.show.planning import check_one_policy, check_predicted, own_shards


def print_profile(facts: TracedStep, profile: StepProfile, predicted: Seconds | None) -> None:
    """The tables of a profile."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    for found in tables(profile, beside(profile, predicted), facts.flops, facts.memory):
        shown = empty_table(found.title, *found.headings)
        for row in found.rows:
            shown.add_row(*row)
        console.print(shown, "")


def write_profile_page(
    path: Path, name: str, facts: TracedStep, profile: StepProfile, predicted: Seconds | None
) -> None:
    """Write the same tables as an HTML page. Raises `UserError` for a file that cannot be written."""
    found = tables(profile, beside(profile, predicted), facts.flops, facts.memory)
    with writing(path):
        path.write_text(profile_page(name, ((one.title, one.headings, one.rows) for one in found)), "utf-8")


def profile_json(facts: TracedStep, profile: StepProfile, predicted: Seconds | None) -> dict[str, Any]:
    """The same, as plain dicts, lists, numbers and strings."""
    return {**vars(facts), **json_of(profile, beside(profile, predicted))}


def predicted_here(tree: Train, report: Callable[[str], None]) -> Seconds | None:
    """What the planner's time model says of a run's own layout on the devices that are here; None where it knows
    nothing of the run, of which `report` is told why."""
    try:
        placement = program(tree).placement
        target = _target(placement)
        check_predicted(tree, target)
        check_one_policy(tree.execution.remat)
        return seconds(own_shards(tree, placement), target)
    except UserError as error:
        report(f"no prediction: {error}")
        return None


def _target(placement: Placement) -> Target:
    """The machine that a placement's devices are."""
    devices = placement.devices
    if placement.platform == CPU:
        return Target(f"{CPU}:{len(devices)}", this_cpu(len(devices)), (1, len(devices)))
    chip = known(placement.chip)
    hosts = len({one.process_index for one in devices})
    shape = _torus(chip, devices) if chip.torus else (hosts, len(devices) // hosts)
    return Target.of(f"{chip.name}:{'x'.join(map(str, shape))}", dict(chips()))


def _torus(chip: Chip, devices: Sequence[Any]) -> tuple[int, ...]:
    """The chips along each dimension of the smallest torus around `devices`."""
    sides = zip(*(one.coords[: chip.torus] for one in devices), strict=True)
    return tuple(1 + max(side) - min(side) for side in sides)
