"""docs/pipelines.md: its numbers, formulas, pictures and messages are what the tool gives."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import Costs, FromFile, OneFOneB, executed, figures, lockstep, schedules
from axon.parallel.pipeline.gantt import gantt
from axon.parallel.pipeline.text import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipelines.md").read_text()
OWN = ROOT / "docs" / "pipelines" / "eager.txt"
NAMES = {name: getattr(schedules, name) for name in schedules.__all__}


def table(heading: str) -> dict[str, list[str]]:
    """First cell → the others, of the table whose first line has this text."""
    lines = next(part for part in PAGE.split("\n\n") if heading in part and part.startswith("|")).split("\n")[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


NUMBERS, FORMULAS = table("executed, remat none"), table("time lost")


@pytest.mark.parametrize("schedule", NUMBERS)
def test_the_numbers_are_the_tools(schedule):
    own = eval(schedule, dict(NAMES)).table(4, 8)
    running = lockstep(own)
    virtual = own.chunks.virtual
    one, all_ = figures(own), figures(running)
    times = [figures(running, executed(running, recomputed)).lockstep for recomputed in (0, 1)]
    assert NUMBERS[schedule] == [
        f"{one.bubble.max():.1%}".replace("%", " %"),
        f"{one.stash.max() / virtual:g}",
        f"{all_.lockstep / all_.busy.max() - 1:.1%}".replace("%", " %"),
        f"{all_.stash.max() / virtual:g}",
        *(f"{time:g}" for time in times),
    ]


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formulas_are_those_of_the_tables(name, rng):
    """Evaluated as they stand, for costs for which they hold."""
    stages, times = int(rng.integers(2, 7)), int(rng.integers(2, 5))
    schedule = NAMES[name](virtual=3) if name == "Interleaved" else NAMES[name]()
    own = schedule.table(stages, stages * times)
    costs = Costs(*rng.uniform(0.5, 2, 3))
    if name == "ZeroBubbleH1":
        costs = Costs(1, float(rng.uniform(0.7, 2)), float(rng.uniform(0.2, 0.7)))
    pair = Costs(1, 1.5, 0.8, pair=2.9) if name == "DualPipeV" else costs
    alone = Costs() if name == "ZeroBubbleV" else pair
    found, running = figures(own, alone), figures(lockstep(own), costs)

    def lost(formula: str, of: Costs) -> float:
        return value(formula, stages, own, of)

    expected = [value(FORMULAS[name][column], stages, own, costs) for column in (1, 3)]
    assert found.time - found.busy[-1] == pytest.approx(lost(FORMULAS[name][0], alone), abs=1e-9)
    assert running.lockstep - running.busy[0] == pytest.approx(lost(FORMULAS[name][2], costs), abs=1e-9)
    np.testing.assert_array_equal(found.stash, np.broadcast_to(expected[0], stages))
    np.testing.assert_array_equal(running.stash, np.broadcast_to(expected[1], stages))


def value(formula: str, stages: int, own, costs: Costs):
    """Of a formula of the page; one in `s` has a value for each stage."""
    whole = costs.backward_input + costs.backward_weight
    names = {"p": stages, "m": own.microbatches, "v": own.chunks.virtual, "s": np.arange(stages), "min": np.minimum}
    names |= {"F": costs.forward, "B": whole, "I": costs.backward_input, "W": costs.backward_weight, "FB": costs.pair}
    return eval(formula.replace("−", "-").replace("·", "*"), names)


def test_every_schedule_has_a_section_and_a_picture_that_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_schedules"))["SCHEDULES"]
    assert {type(schedule).__name__ for schedule in drawn.values()} == set(NAMES)
    for name, schedule in drawn.items():
        assert f"### {type(schedule).__name__}\n\n![" in PAGE
        assert f"(pipelines/{name}.png)" in PAGE
        assert (ROOT / "docs" / "pipelines" / f"{name}.png").stat().st_size < 60_000


def test_the_printed_schedule_is_real():
    assert "\n".join(gantt(lockstep(OneFOneB().table(4, 4))).splitlines()[:4]) in PAGE


def test_the_table_of_ones_own_and_what_is_said_of_broken_ones_are_real():
    text = OWN.read_text()
    assert f"```\n{text.split(chr(10), 1)[1]}```" in PAGE
    assert parse(text, "eager.txt").ticks == 12
    exchanged = text.replace("F3 B0 F1\nB0 F3 B1", "F3 F3 F1\nB0 B0 B1")
    with pytest.raises(UserError) as broken:
        parse(exchanged, "eager.txt")
    assert f"\n{broken.value}\n" in PAGE
    with pytest.raises(UserError) as other:
        FromFile(str(OWN)).table(3, 8)
    assert f"\n{str(other.value).replace(str(OWN), 'eager.txt')}\n" in PAGE
