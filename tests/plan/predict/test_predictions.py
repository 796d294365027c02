"""What is predicted of a step, beside the real program's own declarations and the schedule's own figures."""

import pytest
from planning import SIZES, mixture, program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn.router import Routing
from axon.parallel.pipeline import Costs, Interleaved, OneFOneB, figures, lockstep
from axon.parallel.pipeline.partition import width
from axon.plan.memory import arguments
from axon.plan.predict.memory import BUFFERS, RING_HELD, memory, of_chunk
from axon.plan.predict.seconds import BUBBLE, EXPERTS, GRADIENTS, PRODUCTS, REPEATED, TENSOR, UPDATE, WEIGHTS, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.traced import trace
from axon.plan.predict.work import Work
from axon.plan.slots import slot_sizes
from axon.train.masked import MaskedToken
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.bert import Bert
from models.deepseek import DeepSeek

STREAM = {"seq.residual": ("context", "tensor")}


@pytest.fixture(scope="module")
def dense():
    return Work.of(program())


@pytest.fixture(scope="module")
def experts():
    return Work.of(mixture())


def shards(work, devices, remat="full", **fields):
    layout = Layout(**fields)
    split = Split(work, Placement.described(layout, devices, "tpu"))
    return Shards(split, layout, Execution(remat=remat))


def on(name):
    return Target.of(name, dict(CHIPS))


def test_forward_flops_are_the_models_own_and_remat_repeats_a_forward_at_most(dense):
    (period,) = dense.periods
    total = period.times * period.forward * (1 + period.backward) + dense.head
    assert total == pytest.approx(dense.program.flops_per_token, rel=1e-6)
    assert period.under("none").repeated == 0
    assert 0.5 < period.under("full").repeated <= 1.01
    assert period.under("minimal").repeated < period.under("full").repeated / 2


def test_a_layer_keeps_its_input_alone_with_full_remat_and_more_with_less(dense):
    (period,) = dense.periods
    kept = {policy: period.under(policy).kept.of(1, 1, 1) for policy in ("none", "minimal", "full")}
    assert period.full.kept.bytes["stream"] == 64 * 2
    assert period.full.kept.bytes["heads"] == 0
    assert kept["full"] < kept["minimal"] < kept["none"]


@pytest.mark.parametrize(
    ("devices", "fields"),
    [
        (8, {"mesh": {"data": 8}, "zero": 3}),
        (8, {"mesh": {"data": 4, "tensor": 2}, "zero": 1}),
        (16, {"mesh": {"data": 2, "tensor": 8}, "zero": 2, "replicate_kv": 2}),
        (8, {"mesh": {"pipe": 2, "data": 4}, "zero": 1, "microbatches": 4}),
    ],
)
def test_state_is_that_of_the_real_program(dense, devices, fields):
    layout = Layout(**fields)
    real = arguments(program(layout, devices))
    found = memory(shards(dense, devices, **fields)).parts
    for kind in ("parameters", "optimizer"):
        assert found[kind] == pytest.approx(real[kind], rel=1e-3)


def test_places_that_no_layer_takes_are_paid_for():
    work = Work.of(program(layers=3))
    even, padded = (shards(work, p, mesh={"pipe": p}, pad_layers=True, microbatches=4) for p in (3, 2))
    assert (even.periods(0), padded.periods(0)) == (1, 2)
    layout = Layout(mesh={"pipe": 2}, pad_layers=True, microbatches=4)
    assert memory(padded).parts["parameters"] == pytest.approx(arguments(program(layout, 2, layers=3))["parameters"])


@pytest.mark.parametrize(("virtual", "layers", "dense"), [(1, 11, 3), (2, 13, 2), (1, 6, 5)])
def test_a_stage_runs_as_many_periods_of_each_segment_as_in_the_real_program(virtual, layers, dense):
    """The cut is the executor's: where segments cost differently no stage has as many of each as another."""
    sizes = {"vocab": 128, "embed": 32, "heads": 4, "mlp": 512, "expert_mlp": 16, "layers": layers, "shared": 0}
    model = DeepSeek(**sizes, first_dense=dense, routing=Routing(4, 2), q_latent=None, kv_latent=16)
    layout = Layout(mesh={"pipe": 4}, pad_layers=True, microbatches=4, schedule=Interleaved(virtual))

    def of(layout, devices):
        parts = {"batch": 8, "seq": 16, "placement": Placement.described(layout, devices, "tpu")}
        return Program(model, layout, AdamW(Constant(1e-3)), **parts)

    found = shards(Work.of(of(Layout(mesh={"data": 1}), 1)), 4, **vars(layout))
    cut = of(layout, 4).evaluator.pipeline.partition
    assert found.places == tuple(map(width, cut))
    assert [found.periods(n) for n in range(2)] == [virtual * width(one) for one in cut]


def test_each_way_to_split_takes_its_share_of_memory_and_work(dense):
    one = shards(dense, 1, mesh={"data": 1})
    tensor = shards(dense, 4, mesh={"tensor": 4}, rows=STREAM)
    data = shards(dense, 4, mesh={"data": 4}, zero=3)
    assert tensor.split.flops[0] == pytest.approx(one.split.flops[0] / 4)
    assert (tensor.tokens, data.tokens) == (one.tokens, one.tokens / 4)
    assert memory(data).parts["optimizer"] == pytest.approx(memory(one).parts["optimizer"] / 4, rel=0.01)
    activations = {name: memory(split).parts["activations"] for name, split in (("one", one), ("data", data))}
    assert activations["data"] == pytest.approx(activations["one"] / 4)
    kept = dense.periods[0].full.kept
    parts = one.tokens * (4 * (kept.bytes["stream"] / 4 + kept.bytes["tokens"]) - 3 * kept.shared)
    assert memory(tensor).parts["activations"] == pytest.approx(parts)
    unsplit = shards(dense, 4, mesh={"tensor": 4})
    assert memory(unsplit).parts["activations"] == pytest.approx(activations["one"])


@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(2, split=True)], ids=repr)
def test_what_waits_on_a_stage_is_predicted_as_the_real_program_traces_it(schedule, remat, dense):
    layout = Layout(mesh={"pipe": 2, "data": 2}, microbatches=4, schedule=schedule)
    real = slot_sizes(program(layout, 4, execution=Execution(remat=remat)))
    found = of_chunk(shards(dense, 4, remat, mesh=layout.mesh, microbatches=4, schedule=schedule))
    assert found.stream == real.stream
    assert found.residuals == pytest.approx(real.residuals, rel=0.1, abs=0.1 * real.stream)
    assert found.left == pytest.approx(real.left, rel=0.1)


@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_angles_of_positions_wait_once_however_many_layers_rotate_by_them(remat):
    found = {layers: Work.of(program(layers=layers)) for layers in (2, 6)}
    waits = {n: memory(shards(work, 1, remat, mesh={"data": 1})).parts["activations"] for n, work in found.items()}
    kept, tokens = found[2].periods[0].under(remat).kept, 32 * 128
    angles = 2 * 4 * SIZES["head_dim"] // 2
    assert angles <= kept.shared <= 4 * 2 * SIZES["head_dim"] + 16
    assert waits[6] - waits[2] == pytest.approx(4 * tokens * (kept.of(1, 1, 1) - kept.shared))
    assert waits[2] == pytest.approx(tokens * (2 * kept.of(1, 1, 1) - kept.shared))


def test_a_step_of_one_device_is_its_products_and_sends_nothing(dense):
    found = seconds(shards(dense, 1, "none", mesh={"data": 1}), on("h100:1"))
    chip = CHIPS["h100"]
    products = {line.name: line.exposed for line in found.lines}
    (period,) = dense.periods
    tokens = dense.program.batch * dense.program.seq
    assert products[PRODUCTS] == pytest.approx(3 * tokens * period.times * period.forward / chip.peak / chip.sustained)
    assert not [line for line in found.lines if line.mesh_axes]
    assert found.mfu == pytest.approx(dense.model_flops / (found.total * chip.peak))


def test_remat_costs_time_and_saves_memory(dense):
    some = {remat: shards(dense, 8, remat, mesh={"data": 8}, zero=3) for remat in ("none", "minimal", "full")}
    times = {remat: seconds(one, on("h100:8")) for remat, one in some.items()}
    assert times["none"].of(REPEATED) <= times["minimal"].of(REPEATED) < times["full"].of(REPEATED)
    assert memory(some["none"]).total > memory(some["minimal"]).total > memory(some["full"]).total


def test_what_is_sent_follows_the_layout(dense, experts):
    def sent(work, devices, **fields):
        found = seconds(shards(work, devices, **fields), on(f"h100:{devices}"))
        return {line.name: line.mesh_axes for line in found.lines if line.mesh_axes}

    assert sent(dense, 8, mesh={"data": 8}) == {GRADIENTS: ("data",)}
    assert sent(dense, 8, mesh={"data": 8}, zero=3)[WEIGHTS] == ("data",)
    assert sent(dense, 8, mesh={"tensor": 8}, replicate_kv=2)[TENSOR] == ("tensor", "kv")
    assert EXPERTS not in sent(experts, 8, mesh={"data": 8})
    assert sent(experts, 8, mesh={"data": 2, "expert": 4})[EXPERTS] == ("expert",)


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(2), Interleaved(2, split=True)])
def test_a_pipeline_takes_as_long_as_its_table_in_lockstep(dense, schedule):
    fields = {"mesh": {"pipe": 2}, "microbatches": 8, "schedule": schedule}
    found = seconds(shards(dense, 2, **fields), on("v5e:1x2"))
    again = dense.periods[0].under("full").repeated
    one = found.of(PRODUCTS) / 3 / 8
    others = (found.total - found.of(PRODUCTS, REPEATED, BUBBLE, "head and loss", "update", "between stages")) / 3 / 8
    costs = Costs(one + others, one + others + again * one, one + others)
    expected = figures(lockstep(schedule.table(2, 8)), costs).lockstep
    work = found.of(PRODUCTS, REPEATED, BUBBLE, "element-wise work")
    assert work + found.of(GRADIENTS) == pytest.approx(expected, rel=0.02)


def test_a_ring_holds_more_at_work_by_its_queries_keys_and_values(dense):
    fields = {"mesh": {"context": 4}, "rows": {"vocab": None}}
    ring, whole = (shards(dense, 4, context=context, **fields) for context in ("ring", "gather"))
    width = SIZES["heads"] * SIZES["head_dim"] + 2 * SIZES["kv_heads"] * SIZES["head_dim"]
    assert memory(ring).total - memory(whole).total == pytest.approx(RING_HELD * ring.tokens * width)


@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
@pytest.mark.parametrize("virtual", [1, 2])
def test_what_lies_between_the_parts_of_a_backward_is_what_the_executor_has_slots_for(dense, remat, virtual):
    fields = {"mesh": {"pipe": 2, "data": 2}, "microbatches": 4, "schedule": Interleaved(virtual, split=True)}
    real = program(Layout(**fields), 4, execution=Execution(remat=remat))
    found, whole = (shards(dense, 4, remat, **{**fields, "schedule": one}) for one in (fields["schedule"], OneFOneB()))
    between = found.tokens * found.places[0] * found.split.left(0, remat)
    assert between == pytest.approx(slot_sizes(real).left, rel=1e-6)
    assert (found.splits, whole.splits) == (True, False)
    if virtual == 1:
        inputs, gradients = (found.run.pools[i] - whole.run.pools[i] for i in range(2))
        chunk = found.tokens * found.split.waiting(remat, found.places.__getitem__)
        more = found.run.pools.gradients * between + inputs * chunk + (inputs + gradients) * found.stream
        assert memory(found).parts["activations"] - memory(whole).parts["activations"] == pytest.approx(more)


def test_rings_hide_what_is_sent_of_split_blocks_behind_the_products(dense):
    plain, rings = (
        seconds(shards(dense, 4, mesh={"tensor": 4}, rows=STREAM, overlap=overlap), on("h100:4"))
        for overlap in ((), ("tensor",))
    )
    (ring,) = (line for line in rings.lines if line.name == TENSOR)
    one, chip = shards(dense, 4, mesh={"tensor": 4}, rows=STREAM), CHIPS["h100"]
    attention = 3 * one.tokens * one.split.attention[0] * 4 / chip.peak / chip.sustained
    assert ring.seconds == pytest.approx(plain.of(TENSOR))
    assert ring.hidden == pytest.approx(min(ring.seconds, plain.of(PRODUCTS) - attention))
    assert rings.total == pytest.approx(plain.total - plain.of(TENSOR) + ring.exposed)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_gradients_are_summed_in_each_microbatch_with_zero_2_alone(dense, micro):
    """ZeRO-1 sums once, and gathers what it has updated; ZeRO-2 sums to parts in every microbatch."""

    def at_the_end(zero, micro):
        layout = {"mesh": {"data": 8}, "zero": zero, "microbatches": micro}
        return seconds(shards(dense, 8, **layout), on("h100:8")).of(GRADIENTS)

    gather = at_the_end(0, 1) / 2  # of float32, as the sum
    assert at_the_end(0, micro) == at_the_end(1, micro) == pytest.approx(2 * gather)
    assert at_the_end(2, micro) == pytest.approx((micro + 1) * gather)


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_each_further_microbatch_reads_two_gradients_and_writes_their_sum(dense, micro):
    def update(micro):
        one = shards(dense, 8, mesh={"data": 8}, microbatches=micro)
        return one.split.gradients, seconds(one, on("h100:8")).of(UPDATE)

    gradients, took = update(micro)
    assert took - update(1)[1] == pytest.approx((micro - 1) * 3 * gradients / CHIPS["h100"].bandwidth)


def test_experts_are_multiplied_where_they_are_chosen(experts):
    (period,) = experts.periods
    assert period.chosen == 0.5
    whole = shards(experts, 1, mesh={"data": 1})
    split = shards(experts, 4, mesh={"expert": 4})
    assert split.split.flops[0] == pytest.approx(whole.split.flops[0])
    assert memory(split).parts["parameters"] < memory(shards(experts, 4, mesh={"data": 4})).parts["parameters"]


def test_where_devices_share_experts_there_is_room_for_uneven_loads_and_an_overflow_round(experts):
    rows, capacity = sum(experts.periods[0].none.kept.rows.values()), Execution().capacity_factor
    assert rows > 2 * (SIZES["embed"] + 3 * SIZES["mlp"]) * 2, (
        "of each copy what is dispatched, gate, up and their product"
    )
    alone, shared = (shards(experts, 4, mesh={axis: 4}) for axis in ("data", "expert"))
    assert (alone.split.rows[0], shared.split.rows[0]) == pytest.approx((rows, capacity * rows))
    assert shared.split.kept(0, "none") - alone.split.kept(0, "none") == pytest.approx((capacity - 1) * rows)
    sent = 2 * BUFFERS * capacity * 2 * shared.stream  # rounds, of two copies
    again = shared.tokens * shared.split.rows[0] + 2 * shared.split.experts[0].bytes
    at_work = shared.tokens * shared.split.kept(0, "none") + again + sent
    parts = memory(shared).parts
    assert parts["a layer at work"] + parts["collective buffers"] == pytest.approx(at_work)


@pytest.mark.parametrize("made", [program, mixture])
def test_a_policy_by_name_is_as_jax_traces_it(made, rng):
    """What a random set keeps and what its backward repeats are told from the program without remat."""
    work = Work.of(made())
    (period,) = work.periods
    names = tuple(name for name in sorted(work.names) if rng.random() < 0.5) or ("query",)
    copies = {program: 1, mixture: 2}[made]
    found, traced = period.under(names), trace(work.program, 0, work.frozen, names, copies)
    for mine, own in ((found.kept, traced.kept), (found.waits, traced.waits)):
        assert mine.of(1, 2, 3) == pytest.approx(own.of(1, 2, 3))
    again = (traced.flops - traced.attention) / (period.none.flops - period.none.attention) - 1
    forward, whole = (flops - n * period.own for n, flops in ((1, period.forward), (3, work_of(period))))
    assert found.repeated == pytest.approx(again * whole / forward, abs=1e-6)


def work_of(period):
    """FLOPs of a token, forward and backward."""
    return period.forward * (1 + period.backward)


def test_a_model_whose_layers_are_not_known_is_refused():
    layout, model = Layout(mesh={"data": 1}), Bert(vocab=64, embed=16, layers=1, heads=2, mlp=32, positions=16)
    parts = {"objective": MaskedToken(), "placement": Placement.described(layout, 1)}
    bert = Program(model, layout, AdamW(Constant(1e-3)), batch=2, seq=16, **parts)
    with pytest.raises(UserError, match=r"LanguageModel.*Bert"):
        Work.of(bert)
