"""What `axon show` says and draws of a pipeline."""

import re
from dataclasses import replace

import pytest

from axon.chips import chips
from axon.config import dump
from axon.layout import Execution, Layout, sequence_parallel
from axon.parallel.pipeline import GPipe, Interleaved, TwoBW, ZeroBubbleH1, lockstep, slots
from axon.parallel.pipeline.rows import rows
from axon.plan.memory import arguments
from axon.plan.slots import slot_sizes
from axon.run import program
from axon.show.schedule import _Running, draw_schedule
from axon.show.show import show_config


@pytest.fixture
def pipelined(tiny):
    """pipelined(**fields of Layout): the tiny run, batch 8 × 32 tokens of width 32, on such a layout."""
    return lambda layers=2, **layout: replace(tiny, model=replace(tiny.model, layers=layers), layout=Layout(**layout))


@pytest.fixture
def shown(tmp_path, capsys):
    def of(train, **options):
        (tmp_path / "tiny.gin").write_text(dump(train))
        show_config(tmp_path / "tiny.gin", (), **options)
        return capsys.readouterr().out

    return of


@pytest.mark.full
@pytest.mark.draws(1)
def test_the_schedule_that_runs_is_shown_with_bubble_and_memory(pipelined, shown):
    out = shown(pipelined(mesh={"pipe": 2, "data": 2}, microbatches=2))
    assert "pipeline: OneFOneB in lockstep, 2 stages, 2 microbatches\n" in out
    kept = re.findall(r"(F0.*) bubble 50.0% peak stash ([21]) (\S+) MiB kept", out)
    assert [work.split() for work, *_ in kept] == [
        ["F0", "F1", "·········B0", "B1"],
        ["F0", "B0", "F1", "B1", "······"],
    ]
    assert [stash for _, stash, _ in kept] == ["2", "1"]
    found = re.search(r"keeps most: (\d+) inputs of (\S+) MiB, each with (\S+) MiB that its backward needs", out)
    slots, stream, residuals = map(float, found.groups())
    assert (slots, stream) == (3, 0.00781)
    assert float(kept[0][2]) == pytest.approx(2 * (stream + residuals), rel=0.01)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_devices_memory_is_told_by_the_planners_model_of_what_the_program_declares(pipelined, shown):
    """A stage has 2 of 4 layers, and slots of its chunk as it is traced; a schedule that would be faster is told so
    too, with the second part's slots where backwards are split."""
    train = pipelined(layers=4, mesh={"pipe": 2}, microbatches=4)
    out = shown(train)
    total, listed = re.search(r"by prediction a step takes (\S+) GiB of each device: (.*)\n", out).groups()
    parts = {name: float(size) for name, size in re.findall(r"(\D+) ([\d.]+)(?:, |$)", listed)}
    assert float(total) == pytest.approx(sum(parts.values()), abs=0.03)
    built = program(train)
    running = _Running.of(train, built)
    found = running.memory.parts
    assert found["activations"] == slot_sizes(built).total(rows(built.evaluator.pipeline.table)[1])
    assert {kind: found[kind] for kind in ("parameters", "optimizer", "batch")} == arguments(built)
    memory = {one.schedule: one.memory for one in running.others}
    assert memory[Interleaved(1)] == pytest.approx(running.memory.total)
    assert memory[Interleaved(2)] < memory[Interleaved(2, split=True)]
    split = program(pipelined(layers=4, mesh={"pipe": 2}, microbatches=4, schedule=Interleaved(2, split=True)))
    slots = slot_sizes(split).total(rows(split.evaluator.pipeline.table)[1])
    more = memory[Interleaved(2, split=True)] - memory[Interleaved(1)]
    assert more == pytest.approx(slots - found["activations"], abs=0.05 * slots)


def test_what_waits_is_what_remat_keeps(pipelined):
    train = pipelined(layers=4, mesh={"pipe": 2}, microbatches=4, schedule=Interleaved(2, split=True))
    nothing, all_ = (
        slot_sizes(program(replace(train, execution=Execution(remat=remat)))) for remat in ("none", "full")
    )
    assert nothing.stream == all_.stream == 2 * 32 * 32 * 4
    assert all_.residuals < 0.2 * nothing.residuals
    assert 0 < nothing.left < all_.left  # what is computed again is not computed for the weights once more


@pytest.mark.full
def test_what_is_in_flight_without_a_flush_is_among_the_totals_with_a_second_version_of_the_weights(pipelined, shown):
    out = shown(pipelined(mesh={"pipe": 2}, microbatches=4, schedule=TwoBW()))
    assert "pipeline: TwoBW in lockstep, 2 stages, 4 microbatches\n" in out
    assert out.count("bubble 0.0%") == 2

    def per_device(kind):
        (line,) = (line for line in out.splitlines() if line.strip().startswith(f"{kind}  "))
        return int(line.split()[-1].replace(",", ""))

    weights, flying = per_device("params"), per_device("in flight")
    slots = 4 * 2 * (5 + 3 + 2) * 32 * 32  # of 2 sequences: inputs, gradients and one of each on its way
    assert 2 * weights < flying - slots < 2.1 * weights


def test_without_stages_there_is_nothing_to_show(pipelined, shown, tmp_path):
    out = shown(pipelined(mesh={"data": 2}), picture=tmp_path / "mesh.png")
    assert "pipeline:" not in out
    assert not (tmp_path / "mesh-schedule.png").exists()


@pytest.mark.full
@pytest.mark.draws(1)
def test_the_schedule_is_drawn_into_a_file_of_its_own_and_what_few_microbatches_cost_is_said(
    pipelined, shown, tmp_path
):
    out = shown(pipelined(4, mesh={"pipe": 4}, microbatches=2), picture=tmp_path / "mesh.png")
    assert f"the mesh and a weight on it are drawn into {tmp_path / 'mesh.png'}\n" in out
    assert f"the pipeline's schedule is drawn into {tmp_path / 'mesh-schedule.png'}\n" in out
    for name in ("mesh.png", "mesh-schedule.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert_idle(out)


def assert_idle(out):
    """What fewer microbatches than stages cost is said."""
    assert out.count("bubble 150.0%") == 4
    assert (
        "with 2 microbatches 2 of 4 stages are idle at any time: the more microbatches, the smaller the bubble" in out
    )


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_schedule_is_named_with_what_was_chosen(pipelined, shown):
    out = shown(pipelined(4, mesh={"pipe": 2}, microbatches=2, schedule=Interleaved(virtual=2)))
    assert "pipeline: Interleaved(virtual=2, split=False) in lockstep, 2 stages" in out


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("schedule", "time", "faster"),
    [(None, "16", r"Interleaved\(virtual=1, split=True\) would take 15, .*"), (ZeroBubbleH1(), "15", "no schedule .*")],
)
def test_what_is_computed_again_is_in_a_steps_time_and_a_faster_schedule_is_named(
    schedule, time, faster, pipelined, shown
):
    """3 microbatches on 2 stages: 4 · (3 + 1), and 4 · (1 + 2) + 3 where backwards are split."""
    train = pipelined(mesh={"pipe": 2}, microbatches=3, schedule=schedule)
    train = replace(train, data=replace(train.data, batch=6), execution=Execution(remat="full"))
    out = shown(train)
    assert re.search(rf"as executed, with remat 'full', a step takes as long as {time} forwards of a stage\n", out)
    assert re.search(rf"^{faster}$", out, re.MULTILINE)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("remat", [("attention", "gate"), {"attention": "save", "gate": "offload"}], ids=str)
def test_what_names_leave_to_be_computed_again_is_a_number(remat, pipelined):
    train = pipelined(layers=4, mesh={"pipe": 2}, microbatches=4)

    def time(remat):
        own = replace(train, execution=Execution(remat=remat))
        (found,) = re.findall(r"as long as ([\d.]+) forwards", _Running.of(own, program(own)).time_taken)
        return float(found)

    assert time("none") + 0.5 < time(remat) < time("full") - 0.5


@pytest.fixture
def on_chip(monkeypatch):
    """on_chip(**fields): the devices are taken for v5e chips with these values."""

    def taken(**fields):
        chip = replace(chips()["v5e"], **fields)
        monkeypatch.setattr("axon.show.schedule.chip_of", lambda _: chip)
        monkeypatch.setattr("axon.show.schedule.part", lambda _: 1)

    return taken


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_schedule_is_proposed_by_the_chips_memory_and_traffic(pipelined, on_chip):
    train = pipelined(layers=4, mesh={"pipe": 2}, microbatches=4)
    running = _Running.of(train, program(train))
    by_time = sorted(running.others, key=lambda one: one.time)
    on_chip(bandwidth=1e30)
    assert _Running.of(train, running.program).faster() == [str(by_time[0])]
    sizes = sorted(one.memory for one in by_time)
    on_chip(bandwidth=1e30, memory=sizes[0] - 1)
    (line,) = _Running.of(train, running.program).faster()
    assert line.endswith("GiB, those of the chip")
    on_chip(bandwidth=1.0)
    without = [one for one in by_time if not one.schedule.split]
    assert _Running.of(train, running.program).faster() == [str(without[0])]


@pytest.mark.few(parts=(2,))
@pytest.mark.parametrize("parts", [1, 2])
def test_the_memory_is_of_this_model_and_layout(pipelined, parts, tmp_path):
    """Of a microbatch's 2 × 32 tokens of width 32 in float32 a device has half of the sequences, or a quarter."""
    own = sequence_parallel() if parts > 1 else {}
    mesh = {"pipe": 2, "data": 2, "tensor": 2}
    compiled = program(pipelined(mesh=mesh, rows=own, microbatches=4, schedule=GPipe()))
    assert slot_sizes(compiled).stream == 32 // parts * 32 * 4
    assert draw_schedule(compiled, tmp_path / "mesh.svg") == tmp_path / "mesh-schedule.svg"
    found = (tmp_path / "mesh-schedule.svg").read_text()
    assert "<!-- GPipe, each stage by itself -->" in found
    assert "<!-- GPipe in lockstep: what runs -->" in found


def test_the_slots_that_are_reserved_are_those_of_the_stage_that_needs_most():
    table = lockstep(Interleaved().table(4, 8))
    assert rows(table)[1].inputs == slots(table).inputs.max() + 1
