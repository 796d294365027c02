"""The picture as text."""

import re

import pytest

from axon.parallel.pipeline import Costs, Interleaved, OneFOneB, TwoBW, figures, lockstep, slots
from axon.parallel.pipeline.gantt import gantt
from axon.parallel.pipeline.rows import SlotBytes


def test_the_picture_of_two_stages():
    assert gantt(OneFOneB().table(2, 2), Costs(1, 1, 1)).splitlines()[:2] == [
        "stage 0 F0 F1 ······B0    ···B1     bubble 50.0% peak stash 2",
        "stage 1 ···F0 B0    F1 B1    ······ bubble 50.0% peak stash 1",
    ]


def test_uniform_ticks_are_drawn_in_lockstep():
    assert gantt(lockstep(OneFOneB().table(2, 2))).splitlines()[:2] == [
        "stage 0 F0 F1 ·········B0    B1     bubble 50.0% peak stash 2",
        "stage 1 ···F0 B0    F1 B1    ······ bubble 50.0% peak stash 1",
    ]


def test_rows_are_equally_long_whatever_the_costs(rng):
    text = gantt(Interleaved(2).table(3, 5), Costs(*rng.uniform(0.5, 2, 3)), width=10_000)
    rows = text.splitlines()[:3]
    assert len({len(row) for row in rows}) == 1
    assert all(row.count("F4/1") == 1 for row in rows)


def test_where_microbatches_have_no_room_the_actions_do():
    lines = gantt(lockstep(OneFOneB().table(2, 8)), width=75).splitlines()
    assert lines[0].startswith("stage 0 FF··FB-FB-")
    assert lines[1].startswith("stage 1 ·FB-FB-")
    assert lines[2].startswith("F forward, B backward")


@pytest.mark.parametrize("costs", [Costs(), Costs(0.7, 1.3, 1.1)])
def test_a_picture_never_floods_a_terminal_and_says_what_it_leaves_out(costs):
    table = lockstep(OneFOneB().table(16, 64))
    text = gantt(table, costs, width=100, most=8, slot_bytes=SlotBytes(1 << 20, 2 << 20))
    assert max(map(len, text.splitlines())) <= 100 + len("left out")
    *drawn, legend, left_out = text.splitlines()
    assert [line[:8].strip() for line in drawn] == [*(f"stage {number}" for number in range(7)), "⋮", "stage 15"]
    assert all(line.count(" … ") == 1 for line in drawn if line != "⋮")
    assert "microbatches have no room" in legend
    found = re.fullmatch(r"left out: time (\d+) to (\d+) of (\d+), stages 7 to 14", left_out)
    assert found
    begin, end, whole = map(int, found.groups())
    assert 0 < begin < end < whole == round(figures(table, costs).lockstep)


def words_of_memory(table, sizes):
    lines = gantt(table, slot_bytes=sizes).splitlines()[: table.stages]
    return [line.split("peak stash ")[1].split(maxsplit=1)[1].strip() for line in lines]


def test_the_memory_of_a_stages_chunks_is_that_of_its_slots():
    table = lockstep(OneFOneB().table(4, 8))
    words = words_of_memory(table, SlotBytes(1 << 19, 1 << 20))
    assert words == [f"{1.5 * count:.3g} MiB kept" for count in slots(table).inputs]


def test_what_is_left_for_the_weights_and_what_the_host_keeps_are_of_each_stage_too():
    table = lockstep(Interleaved(2, split=True).table(2, 4))
    own = slots(table)
    words = words_of_memory(table, SlotBytes(1 << 20, 2 << 20, 4 << 20, 8 << 20))
    counts = list(zip(own.inputs, own.gradients, strict=True))
    assert words == [f"{3 * i + 4 * g:.3g} MiB kept, {8 * i:.3g} MiB by the host" for i, g in counts]
    assert all(g > 0 for _, g in counts)


def test_without_a_flush_two_batches_are_drawn():
    assert "B7" in gantt(TwoBW().table(2, 4))
