"""What each Pallas kernel does most takes as many VLIW bundles as are recorded, by the TPU compiler."""

import json

import pytest
from typer.testing import CliRunner

from axon.chips import KERNEL_CHIPS
from axon.cli import app
from scripts.bench import bundles

PARTS = bundles.all_parts()
NOISE = 0.03
"""A form that takes so much more is slower; one that takes so much less has a record that would hide the next."""


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("libtpu", reason="needs its compiler: scripts/setup compilers")


def marked(name: str, chip: str):
    mark = pytest.mark.full if chip == "v5p" else pytest.mark.slow
    return pytest.param(name, chip, marks=mark, id=f"{name}, {chip}")


@pytest.mark.parametrize(("name", "chip"), [marked(name, chip) for chip in KERNEL_CHIPS for name in PARTS])
def test_a_part_takes_the_bundles_that_are_recorded(name, chip):
    found, known = bundles.count(name, chip), bundles.recorded()[name]["bundles"][chip]
    assert found == pytest.approx(known, rel=NOISE), "right? Then record it: axon bench kernels --compile"


def test_every_part_has_a_record_for_every_chip_and_it_is_shown():
    recorded = bundles.recorded()
    assert {name: (part["call"], part["flops"]) for name, part in recorded.items()} == {
        name: (part.call, part.flops) for name, part in PARTS.items()
    }
    assert all(part["bundles"].keys() == KERNEL_CHIPS.keys() for part in recorded.values())
    shown = CliRunner().invoke(app, ["bench", "kernels", "--bundles", "--json"])
    rows = json.loads(shown.stdout)
    assert len(rows) == len(PARTS) * len(KERNEL_CHIPS)
    assert all(row.keys() == {"kernel", "part", "chip", "bundles"} and row["bundles"] > 0 for row in rows)
    text = CliRunner().invoke(app, ["bench", "kernels", "--bundles"]).stdout
    assert len(text.splitlines()) == len(PARTS)
    assert "attention: forward, whole tile: v5e" in text
