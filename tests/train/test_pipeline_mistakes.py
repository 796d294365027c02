"""A pipeline that cannot run: one message before anything is traced."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from axon.config import ConfigError, dump, load
from axon.errors import UserError
from axon.layout import Execution, Layout, LayoutError, Placement
from axon.parallel.pipeline import FromFile, GPipe, Interleaved, TwoBW
from axon.run import program

EAGER = (Path(__file__).parents[2] / "docs" / "pipelines" / "eager.txt").read_text()
OTHERS = {
    "cycle.txt": EAGER.replace("F3 B0 F1\nB0 F3 B1", "F3 F3 F1\nB0 B0 B1"),
    "lacks.txt": EAGER.replace("B3 .  .\n", ""),
    "endless.txt": EAGER.replace("microbatches 4", "microbatches 4\nflush no"),
    "short.txt": EAGER.replace("F3 B0 F1", "F3 B0"),
    "other.txt": EAGER.replace("F3 B0 F1", "F3 B0 F9"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with tables of one's own."""
    for name, text in {"eager.txt": EAGER, **OTHERS}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def untraced(monkeypatch):
    """Tracing is a failure."""
    from axon.runtime import Runtime

    monkeypatch.setattr(Runtime, "tracing", lambda *_: pytest.fail("something was traced"))


def of(tiny, layout):
    """The tiny run with 12 layers, on described devices."""
    model = replace(tiny.model, layers=12, vocab=384)
    train = replace(tiny, model=model, layout=layout, data=replace(tiny.data, batch=max(16, layout.microbatches)))
    return program(train, Placement.described(layout, math.prod(layout.mesh.values())))


def with_file(path, stages=3, microbatches=4, **layout):
    return Layout({"pipe": stages}, microbatches=microbatches, schedule=FromFile(path), **layout)


MISTAKES = {
    "chunks that do not divide": (
        Layout({"pipe": 2}, microbatches=4, schedule=Interleaved(virtual=4)),
        r"12 of a kind of layers do not divide into 2 stages of 4 chunks each.*a number of layers that 8 divides",
    ),
    "more microbatches than a table can have": (
        Layout({"pipe": 2}, microbatches=2**20),
        r"Layout\.microbatches = 1048576: with 2 stages of 1 chunks the schedule is a table of 4,194,304 pieces",
    ),
    "no stages": (Layout({"data": 2}, schedule=GPipe()), r"GPipe has no effect: Layout\.mesh has no mesh axis 'pipe'"),
    "one stage": (Layout({"pipe": 1}, schedule=GPipe()), r"GPipe has no effect: .* 'pipe' of 2 or more"),
    "layers that are not split": (
        Layout({"pipe": 2}, rows={"layers": None}),
        r"no mesh axis splits 'layers' of stored parameters, .* Take the row of 'layers' out of Layout\.rows",
    ),
    "too few microbatches for two versions": (
        Layout({"pipe": 4}, microbatches=2, schedule=TwoBW()),
        r"there are 2 microbatches and 4 stages\. Use 4 microbatches or more",
    ),
    "a broken table": (
        with_file("cycle.txt"),
        r"cycle\.txt: tick 4, stage 1: F3 needs F3 of stage 0, which that stage does in tick 4; it can be used from "
        r"tick 5 on \(tick 0 is line 5\)",
    ),
    "a table that lacks work": (with_file("lacks.txt"), r"lacks\.txt: stage 0 never does B3: every chunk .* backward"),
    "a table without a flush": (
        with_file("endless.txt"),
        r"4 microbatches on 3 stages in lockstep and without a flush: .* Use 5 microbatches or more",
    ),
    "a line that is too short": (
        with_file("short.txt"),
        r"short\.txt:9: a tick has a cell for each of 3 stages.* has 2",
    ),
    "a microbatch that there is not": (
        with_file("other.txt"),
        r"other\.txt: tick 4, stage 2: microbatch 9 does not exist; must be in \[0, 4\)",
    ),
    "a table for other stages": (
        with_file("eager.txt", stages=2),
        r"eager\.txt is a schedule for 3 stages, and the mesh axis 'pipe' is 2\. Set that to 3, or write a table for 2",
    ),
    "a table for other microbatches": (
        with_file("eager.txt", microbatches=8),
        r"eager\.txt is a schedule for 4 microbatches, and Layout\.microbatches is 8\. Set that to 4, or",
    ),
    "a file that is not there": (
        with_file("eagr.txt"),
        r"FromFile\.path: There is no file or folder .*eagr\.txt\. Did you mean 'eager\.txt'\?",
    ),
    "a file that is no text": (
        with_file("binary.txt"),
        r"FromFile\.path: .*binary\.txt cannot be read: it is not UTF-8 text",
    ),
    "a folder": (with_file("folder"), r"FromFile\.path: .*folder cannot be read: Is a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_pipeline_that_cannot_run_is_refused_before_anything_is_traced(mistake, tiny, here, untraced):
    layout, message = MISTAKES[mistake]
    with pytest.raises((UserError, LayoutError), match=message):
        of(tiny, layout)


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (("gaet",), r"Execution\.remat: no activation is named 'gaet'\. Did you mean 'gate'\?"),
        ({"querry": "offload"}, r"no activation is named 'querry'\. Did you mean 'query'\?"),
    ],
)
def test_names_that_match_nothing_are_refused_before_anything_is_traced(remat, message, tiny, here, untraced):
    with pytest.raises(UserError, match=message):
        of(replace(tiny, execution=Execution(remat=remat)), Layout({"pipe": 2}, microbatches=4))


def test_the_table_that_the_mistakes_are_made_in_is_right(tiny, here, untraced):
    made = of(tiny, with_file("eager.txt")).evaluator.pipeline
    assert made is not None
    assert made.table.uniform


BINDINGS = {
    "OneFOneB.virtual=2": r"OneFOneB has no field 'virtual'\. One chunk on each stage, always; of `Interleaved` the",
    "ZeroBubbleV.virtual=4": r"ZeroBubbleV has no field 'virtual'\. Two chunks on each stage, always",
    "Interleaved.virtual=0": r"Interleaved\.virtual is 0; must be at least 1",
    "Interleaved.virtual=1.5": r"Interleaved\.virtual: expected int, got 1\.5",
    "FromFile.pth='eager.txt'": r"FromFile has no field 'pth'\. Did you mean 'path'\?",
}


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_mistaken_binding_of_a_schedule_is_refused(binding, tiny, here):
    (here / "tiny.gin").write_text(dump(tiny))
    schedule = f"Layout.schedule=@{binding.split('.')[0]}()"
    with pytest.raises(ConfigError, match=BINDINGS[binding]):
        load(here / "tiny.gin", [schedule, binding])


def test_an_unknown_schedule_is_refused(tiny, here):
    (here / "tiny.gin").write_text(dump(tiny))
    with pytest.raises(ConfigError, match=r"Layout\.schedule: unknown name 'GPip'\. Did you mean 'GPipe'\?"):
        load(here / "tiny.gin", ["Layout.schedule=@GPip()"])
