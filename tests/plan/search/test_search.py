"""The search: its best is the best there is, validation accepts it, and where there is nothing it says why."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import mixture, program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn.router import Routing
from axon.parallel.pipeline import Interleaved, OneFOneB, ZeroBubbleH1
from axon.plan.predict.memory import memory
from axon.plan.predict.seconds import BUBBLE, seconds
from axon.plan.predict.shards import Shards
from axon.plan.predict.work import Work
from axon.plan.search import Pins, Planner
from axon.plan.search.keeping import Keeping
from axon.plan.search.plans import ROOM
from axon.plan.search.reasons import why_not
from axon.plan.search.refusals import refusal, would_fit
from axon.plan.search.space import Space
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.gemma import Gemma
from models.llama import Llama
from models.mixtral import Mixtral
from models.qwen3_next import Qwen3Next

EXPERTS = {"routing": Routing(experts=4, top_k=2)}
DELTA = {"shared": 32, "delta_heads": 4, "per_head": 2, "key_dim": 16, "value_dim": 16}


def on(name, memory=None):
    target = Target.of(name, dict(CHIPS))
    return target if memory is None else replace(target, chip=replace(target.chip, memory=memory))


def planner(base, target, pins=Pins(), host=False):
    """The search; with `host`, what may lie in the host's memory is tried too."""
    work, space = Work.of(base), Space(base, target, Layout(), Execution(), pins)
    if host:
        space = replace(space, offloads=True, hosts=(("optimizer",),))

    def build(plan):
        placement = Placement.described(plan.layout, target.devices, target.platform)
        sizes = {"batch": base.batch, "seq": base.seq, "execution": plan.execution, "placement": placement}
        try:
            Program(base.runtime.model, plan.layout, AdamW(Constant(1e-3)), **sizes)
        except UserError:
            return None
        return plan

    return Planner(space, work, build)


@pytest.fixture(scope="module")
def dense():
    return program(seq=512, embed=256, mlp=1024, vocab=4096)


def subsets(work):
    """Every policy that keeps some of the names."""
    names = sorted(work.names)
    return [work.policy(some) for count in range(len(names) + 1) for some in combinations(names, count)]


@pytest.mark.parametrize("room", [2e9, 40e6, 18e6])
def test_the_best_is_the_best_of_all_that_fit(dense, room):
    found = planner(dense, on("h100:8", int(room)), Pins({"mesh": {"pipe": 1}, "zero": 3}))
    names = random.Random(int(room)).sample(subsets(found.work), 8)
    every = []
    for layout in found.space.layouts():
        for run in found.space.runs(layout):
            for remat in ("none", "minimal", "full", *names):
                shards = Shards(found.split(run), run, Execution(remat=remat))
                if memory(shards).total <= ROOM * room and shards.split.divides:
                    every.append(seconds(shards, found.target).total)
    best = found.best(1)
    assert bool(every) <= bool(best)
    if every:
        assert best[0].seconds.total <= min(every) * (1 + 1e-9)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "tensor": 4}, {"pipe": 4, "data": 2}], ids=str)
def test_what_a_plan_keeps_by_name_is_the_best_of_all_sets_in_its_memory(dense, mesh, rng):
    """Of all sets: its memory is no less than is there, and none that fits is faster."""
    found = planner(dense, on("v5e:2x4"), Pins({"mesh": mesh}))
    layout = next(layout for layout in found.space.layouts() if layout.mesh == mesh)
    shards = Shards(found.split(layout), next(found.space.runs(layout)), Execution())
    every = {remat: shards.under(remat) for remat in subsets(found.work)}
    used = {remat: memory(one).total for remat, one in every.items()}
    room = rng.uniform(used["full"], used["minimal"])
    chosen = Keeping(shards, found.target, None).policies(shards, room)[1]
    assert used[chosen] <= room * (1 + 1e-9)
    fastest = min(seconds(one, found.target).total for remat, one in every.items() if used[remat] <= room)
    assert seconds(every[chosen], found.target).total == pytest.approx(fastest, rel=1e-6)


def test_split_schedules_are_tried_and_win_where_microbatches_are_few(dense):
    found = planner(dense, on("h100:2x1"), Pins(layout={"mesh": {"pipe": 2}, "microbatches": 2}))
    runs = {repr(run.schedule) for layout in found.space.layouts() for run in found.space.runs(layout)}
    plain = {repr(OneFOneB()), repr(Interleaved(2))}
    assert runs == plain | {repr(ZeroBubbleH1()), repr(Interleaved(2, split=True))}
    bubbles = {repr(plan.layout.schedule): plan.seconds.of(BUBBLE) for plan in found.ranked}
    assert bubbles[repr(Interleaved(2, split=True))] == min(bubbles.values())


@pytest.mark.full
@pytest.mark.draws(1)
def test_less_memory_never_makes_a_faster_plan(dense):
    times = [planner(dense, on("h100:8", room)).best(1)[0].seconds.total for room in (10**10, 10**8, 5 * 10**7)]
    assert times == sorted(times)


SIZES = {
    "heads": st.sampled_from([4, 6, 8]),
    "layers": st.sampled_from([2, 3, 5]),
    "mlp": st.sampled_from([96, 128]),
    "vocab": st.sampled_from([500, 512]),
}
PINS = (
    st.builds(lambda zero: {"zero": zero}, st.sampled_from([0, 1, 2, 3]))
    | st.builds(lambda axis, size: {"mesh": {axis: size}}, st.sampled_from(["tensor", "pipe"]), st.sampled_from([1, 2]))
    | st.builds(lambda count: {"microbatches": count}, st.sampled_from([1, 2, 4]))
)


@st.composite
def searches(draw):
    """A search for a model of any family and size, batch, machine and pins."""
    sizes = {name: draw(one) for name, one in SIZES.items()}
    sizes["kv_heads"] = draw(st.sampled_from([1, 2, sizes["heads"]]))
    family = draw(st.sampled_from([Llama, Mixtral, Gemma, Qwen3Next]))
    others = {Mixtral: EXPERTS, Gemma: {"window": 64}, Qwen3Next: EXPERTS | DELTA}.get(family, {})
    base = program(batch=draw(st.sampled_from([8, 12, 32])), family=family, **sizes, **others)
    target = on(draw(st.sampled_from(["v5e:2x4", "h100:2x2", "v5p:2x2x1", "h100:3x4"])))
    return planner(base, target, Pins(layout=draw(st.just({}) | PINS)))


@pytest.mark.parametrize("examples", [1, pytest.param(8, marks=[pytest.mark.full, pytest.mark.draws(1)])])
def test_a_plan_for_any_model_machine_and_pins_is_built_by_the_real_program(examples):
    @settings(max_examples=examples)
    @given(searches())
    def holds(found):
        plans, pins = found.best(4), found.space.pins
        if not plans:
            assert not found.ranked
            assert found.target.name in str(refusal(found))
        assert [one.seconds.total for one in plans] == sorted(one.seconds.total for one in plans)
        for plan in plans:
            assert found.accept(plan)
            assert plan.memory.total <= found.room
            assert pins.allow_mesh(plan.layout.mesh)
            assert all(vars(plan.layout)[name] == value for name, value in pins.layout.items() if name != "mesh")

    holds()


def test_a_runner_up_says_what_made_it_lose(dense):
    best, *others = planner(dense, on("h100:2x4")).best(6)
    assert others
    for plan in others:
        reason = why_not(plan, best)
        assert "slower" in reason or "GiB more" in reason
        assert any(line.name in reason for line in plan.seconds.lines) or "GiB more" in reason


def test_state_on_the_host_leaves_room_for_what_would_not_fit_beside_it(dense):
    one = planner(dense, on("v5e:1x1", int(125e6)))
    assert one.best(1) == []
    host = replace(one.space, execution=Execution(host=("optimizer",)))
    found = replace(one, space=host, accept=lambda plan: plan).best(1)
    assert found
    assert "optimizer" not in found[0].memory.parts


def without_host(found):
    """The same search of what lies on devices alone."""
    return replace(found, space=replace(found.space, offloads=False, hosts=()))


def on_host(plan):
    return plan.seconds.sends_to_host


@pytest.fixture(scope="module")
def offloading(dense):
    return planner(dense, on("v5e:2x4"), host=True)


def with_memory(found, memory, host_memory=48e9):
    chip = replace(found.target.chip, memory=int(memory), host_memory=host_memory)
    return replace(found, space=replace(found.space, target=replace(found.target, chip=chip)))


def test_what_fits_on_no_device_alone_gets_a_plan_with_the_host_that_the_real_program_takes(offloading):
    found = with_memory(offloading, 17.5e6)
    assert without_host(found).best(1) == []
    (plan,) = found.best(1)
    assert on_host(plan)
    assert found.accept(plan)
    assert plan.memory.total <= found.room


@pytest.mark.parametrize("memory", [2e9, 120e6, 50e6, 30e6, 20e6])
def test_the_host_never_makes_the_best_plan_slower(offloading, memory):
    found = with_memory(offloading, memory)
    best, alone = found.best(1)[0], without_host(found).best(1)[0]
    assert best.seconds.total <= alone.seconds.total
    if best.seconds.total == alone.seconds.total:
        assert not on_host(best)


def test_nothing_waits_on_the_host_where_all_fits_without(offloading):
    found = with_memory(offloading, 2e9)
    assert not any(map(on_host, found.ranked))
    assert len(found.ranked) == len(without_host(found).ranked)


def test_a_host_without_room_takes_nothing(offloading):
    found = with_memory(offloading, 30e6, host_memory=1e3)
    assert not any(map(on_host, found.ranked))
    assert len(found.ranked) == len(without_host(found).ranked)


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_with_the_host_for_any_model_is_built_by_the_real_program(seed):
    drawn = random.Random(seed)
    made = drawn.choice([program, mixture])(batch=16, layers=drawn.choice([2, 4]), mlp=drawn.choice([96, 256]))
    found = planner(made, on(drawn.choice(["v5e:2x4", "h100:2x2", "v5p:2x2x1"])), host=True)
    least = found.smallest().memory.total / ROOM
    plans = [plan for plan in with_memory(found, drawn.uniform(1.05, 1.5) * least).ranked if on_host(plan)]
    assert plans
    for plan in drawn.sample(plans, min(4, len(plans))):
        assert found.accept(plan), plan.carried_out


def test_pins_are_kept(dense):
    pins = Pins({"zero": 1, "mesh": {"tensor": 2}}, {"remat": "full"})
    plans = planner(dense, on("h100:8"), pins).best(5)
    assert plans
    assert {(one.layout.zero, one.layout.mesh["tensor"]) for one in plans} == {(1, 2)}


@pytest.mark.parametrize(
    "pin", [{"overlap": ("tensor",)}, *({"context": one} for one in ("ring", "ulysses", "gather", "usp"))], ids=str
)
def test_rings_and_ways_to_see_a_sequence_that_are_pinned_are_those_of_all_plans(dense, pin):
    found = planner(dense, on("h100:8"), Pins({"zero": 3, "microbatches": 1, **pin}))
    plans = found.best(3)
    assert plans
    for plan in plans:
        assert pin.items() <= vars(plan.layout).items()
        assert found.accept(plan)
    assert all(pin.items() <= vars(plan.layout).items() for plan in found.ranked)


def test_an_all_to_all_wins_where_keys_are_many_and_a_ring_where_heads_do_not_divide(dense):
    def method(made):
        found = planner(made, on("v5p:2x2x2"), Pins({"mesh": {"context": 8}}))
        return found.best(1)[0].layout.context

    long = {"seq": 2**15, "batch": 8, "head_dim": 64, "embed": 256}
    assert method(program(**long, heads=8, kv_heads=8)) == "ulysses"
    assert method(program(**long, heads=12, kv_heads=4)) == "ring"


def test_a_model_that_fits_nowhere_is_told_what_dominates_and_what_would_fit(dense):
    with pytest.raises(UserError, match=r"nothing fits h100:2.*GiB.*it would fit h100:") as raised:
        raise refusal(planner(dense, on("h100:2", 16 * 2**20)))
    assert any(part in str(raised.value) for part in ("optimizer", "parameters", "gradients", "at work"))


def test_the_smallest_machine_that_something_fits_is_named_and_one_of_another_chip():
    for target, fewest, named in (
        ("h100:2x8", 80, "h100:10x8"),
        ("h100:1x2", 8, "h100:1x8"),
        ("v5p:4x4x4", 300, "v5p:8x8x8"),
        ("v5p:8x8x8", 700, "v5p:8x8x12"),
        ("v5e:4x4", 40, "v5e:8x8"),
    ):
        told = would_fit(on(target), lambda one, fewest=fewest: one.devices >= fewest)
        assert told == f"it would fit {named}"
    assert would_fit(on("h100:3x8"), lambda one: one.chip.name == "h200") == (
        "no number of such chips is enough, and as many devices of h200:3x8"
    )
    assert would_fit(on("v5e:4x4"), lambda one: one.chip.name == "v5p").endswith("and as many devices of v5p:2x2x4")


def test_a_batch_that_nothing_divides_is_told():
    with pytest.raises(UserError, match=r"Data\.batch = 7.*--global-batch"):
        raise refusal(planner(program(batch=7, heads=5, kv_heads=5, layers=1, vocab=501), on("h100:8")))


def test_the_pin_that_leaves_nothing_is_named(dense):
    pins = Pins({"zero": 1, "mesh": {"tensor": 5}})
    with pytest.raises(UserError, match=r"--pin Layout\.mesh"):
        raise refusal(planner(dense, on("h100:8"), pins))
