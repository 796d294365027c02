"""What a training step sends: its traced program against the one that XLA compiles it to, and against formulas."""

import math
import re
from collections import Counter

import jax
import numpy as np
import pytest

from axon.layout import Execution, Layout, Placement
from axon.nn import Routing
from axon.plan.moves import sent
from axon.plan.traffic import WEIGHTS, part, step_communication, summary
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama
from models.mixtral import Mixtral

SEQUENCE_PARALLEL = {"seq.residual": ("context", "tensor")}
BACKWARD = "gradients of activations"

# Layouts whose sums run over one mesh axis each: XLA sends what the program says, but for the sum of the objective over
# devices, a number that nobody reads.
EXACT = {
    "data": Layout({"data": 8}),
    "zero 1": Layout({"data": 8}, zero=1),
    "zero 3": Layout({"data": 8}, zero=3),
    "tensor": Layout({"tensor": 4}),
    "data and tensor": Layout({"data": 2, "tensor": 4}),
    "sequence parallel": Layout({"data": 2, "tensor": 4}, rows=SEQUENCE_PARALLEL),
}
# Sums over two mesh axes at once XLA makes in one collective or in two, and it merges some that follow each other:
# sums of single numbers and of norms' scales, the smallest there are.
CLOSE = {
    "data and tensor, zero 2, microbatches": Layout({"data": 4, "tensor": 2}, zero=2, microbatches=2),
    "zero 3 and tensor": Layout({"data": 4, "tensor": 2}, zero=3),
    "hybrid, sequence parallel": Layout({"replica": 2, "data": 2, "tensor": 2}, zero=3, rows=SEQUENCE_PARALLEL),
}


def random_program(rng, layout, unroll=False, remat="full", placement=None):
    heads, vocab, mlp = (8 * int(rng.integers(*span)) for span in ((1, 3), (4, 20), (4, 20)))
    sizes = {"vocab": vocab, "embed": 4 * heads, "heads": heads, "kv_heads": 8, "mlp": mlp}
    model = Llama(**sizes, layers=int(rng.integers(2, 5)))
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    options = {"execution": Execution(remat=remat, unroll=unroll), "devices": devices, "placement": placement}
    return Program(model, layout, AdamW(Constant(1e-3)), batch=16, seq=16, **options)


def compared(program):
    """What the traced and the compiled step send, as (kind, mesh axes) → bytes.

    XLA's CPU compiler has no reduce-scatter: it makes an all-reduce, and cuts. So each counts as one.
    """
    traced = Counter()
    for one in step_communication(program).transfers:
        scattered = one.kind == "reduce-scatter"
        traced["all-reduce" if scattered else one.kind, one.mesh_axes] += one.bytes * one.times * (1 + scattered)
    return traced, sent_by(program.lower().compile().as_text(), dict(program.placement.mesh.shape))


def some(names, shown=None, full=None):
    """All names as parameters: `shown` unmarked, one marked as full, the others as slow. Each compiles a step."""
    marks = {name: [pytest.mark.slow] for name in names} | {full: [pytest.mark.full], shown: []}
    return [pytest.param(name, marks=marks[name]) for name in names]


def check_exact(program):
    traced, compiled = compared(program)
    assert _gathers(traced) == pytest.approx(_gathers(compiled), rel=1e-9)
    assert traced == pytest.approx(compiled, rel=0, abs=8 * program.placement.layout.microbatches)


@pytest.mark.parametrize("name", some(EXACT, shown="sequence parallel", full="zero 3"))
def test_a_step_sends_what_its_program_says(rng, name):
    check_exact(random_program(rng, EXACT[name]))


@pytest.mark.parametrize("remat", some(("none", "minimal", "full"), full="none"))
def test_unrolled_layers_send_what_their_program_says(rng, remat):
    check_exact(random_program(rng, EXACT["zero 3"], unroll=True, remat=remat))


@pytest.mark.slow
def test_weights_outside_of_the_layers_are_gathered_for_each_microbatch_until_xla_takes_that_out_of_the_loop(rng):
    program = random_program(rng, Layout({"data": 4}, zero=3, microbatches=2))
    traced, compiled = compared(program)
    outside = {"embedding/table", "head", "norm/scale"} - staying(program, tokens=2 * 16)
    once = 3 / 4 * sum(4 * math.prod(program.parameters[path].shape) for path in outside)
    assert traced["all-gather", ("data",)] == pytest.approx(compiled["all-gather", ("data",)] + once)
    assert traced["all-reduce", ("data",)] == pytest.approx(compiled["all-reduce", ("data",)], abs=16)


@pytest.mark.parametrize("name", some(CLOSE, full="data and tensor, zero 2, microbatches"))
def test_a_step_with_sums_over_several_mesh_axes_sends_what_its_program_says_but_for_the_smallest(rng, name):
    program = random_program(rng, CLOSE[name])
    traced, compiled = compared(program)
    assert _gathers(traced) == pytest.approx(_gathers(compiled), rel=1e-9)
    scales = sum(math.prod(spec.shape) for path, spec in program.parameters.items() if path.endswith("scale"))
    small = 8 * (scales * program.placement.layout.microbatches + 2 * len(program.parameters))
    for axes in {axes for _, axes in (*traced, *compiled)}:
        assert traced["all-reduce", axes] == pytest.approx(compiled["all-reduce", axes], abs=small)
    assert small < 0.05 * sum(traced.values())


def _gathers(sent):
    return {key: size for key, size in sent.items() if key[0] == "all-gather"}


def staying(program, tokens):
    """The weights that are not gathered, where each device looks up `tokens`: a table of more rows stays apart."""
    return {"embedding/table"} if tokens < program.parameters["embedding/table"].shape[0] else set()


def test_zero_3_gathers_each_weight_twice_and_scatters_each_gradient_once(rng):
    program = random_program(rng, EXACT["zero 3"])
    apart = staying(program, tokens=2 * 16)
    sizes = {path: 4 * math.prod(spec.shape) for path, spec in program.parameters.items() if path not in apart}
    rows = {(row.kind, row.content): row for row in summary(step_communication(program).transfers, ["data"])}
    forward, backward = rows["all-gather", "weights, forward"], rows["all-gather", "weights, backward"]
    assert forward.bytes == pytest.approx(7 / 8 * sum(sizes.values()))
    assert rows["reduce-scatter", "gradients of weights"].bytes == pytest.approx(7 / 8 * sum(sizes.values()))
    # The loss has the gradients of the head from its forward, the table's need no table, and the last norm's is kept.
    once = ("embedding/table", "head", "norm/scale")
    assert backward.bytes == pytest.approx(7 / 8 * sum(size for path, size in sizes.items() if path not in once))
    assert set(forward.parts) == {"attention", "mlp", "norm", "loss"} | (set() if apart else {"embedding"})
    assert set(backward.parts) == {"attention", "mlp", "norm"}
    # Where the table stays, what changes hands is the vectors of a device's tokens.
    vectors = rows.get(("all-to-all", "activations, forward"))
    embed = program.parameters["head"].shape[0]
    assert (vectors.bytes if vectors else 0) == (7 / 8 * 2 * 16 * 4 * embed if apart else 0)


def contents(program, mesh_axis):
    """(kind, content) → row, of what one mesh axis carries."""
    mesh = list(program.placement.mesh.shape)
    rows = summary(step_communication(program).transfers, mesh)
    return {(row.kind, row.content): row for row in rows if row.mesh_axes == (mesh_axis,)}


def test_tensor_parallelism_sums_activations_forward_and_their_gradients_backward(rng):
    program = random_program(rng, EXACT["tensor"], remat="none")
    layers, embed = program.module.layers.num_layers, program.module.dims["embed"]
    rows, stream, token = contents(program, "tensor"), 2 * 3 / 4 * 4 * 16 * 16 * embed, 2 * 3 / 4 * 4 * 16 * 16
    forward, backward = rows.pop(("all-reduce", "activations, forward")), rows.pop(("all-reduce", BACKWARD))
    # The look-up, two sums a layer, three numbers a token for the loss. Back: query, key, value, gate, up; the loss.
    assert forward.bytes == pytest.approx((1 + 2 * layers) * stream + 3 * token)
    assert backward.bytes == pytest.approx((5 * layers + 1) * stream)
    assert set(forward.parts) == {"embedding", "attention", "mlp", "loss"}
    assert set(backward.parts) == {"attention", "mlp", "loss"}
    assert [content for _, content in rows] == ["norms and metrics"]


def test_sequence_parallelism_scatters_the_same_and_sums_the_gradients_of_norms_alone(rng):
    program = random_program(rng, Layout({"tensor": 4}, rows=SEQUENCE_PARALLEL))
    layers, embed = program.module.layers.num_layers, program.module.dims["embed"]
    rows, stream = contents(program, "tensor"), 3 / 4 * 4 * 16 * 16 * embed
    assert rows["reduce-scatter", "activations, forward"].bytes == pytest.approx((1 + 2 * layers) * stream)
    assert rows["all-gather", "activations, forward"].bytes == pytest.approx((1 + 2 * layers) * stream)
    assert rows["reduce-scatter", "activations, recomputed"].bytes == pytest.approx(layers * stream)
    assert rows["reduce-scatter", BACKWARD].bytes == pytest.approx((5 * layers + 1) * stream)
    assert rows["all-gather", BACKWARD].bytes == pytest.approx((2 * layers + 1) * stream)
    norms = rows["all-reduce", "gradients of weights"]
    assert norms.parts == ("norm",)
    assert norms.bytes == pytest.approx((2 * layers + 1) * 2 * 3 / 4 * 4 * embed)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_parallelism_sends_gradients_of_weights_and_zero_the_new_weights(rng, stage):
    rows = contents(program := random_program(rng, Layout({"data": 8}, zero=stage)), "data")
    size = 7 / 8 * sum(4 * math.prod(spec.shape) for spec in program.parameters.values())
    gradients = {kind: row.bytes for (kind, content), row in rows.items() if content == "gradients of weights"}
    assert gradients == pytest.approx({"reduce-scatter": size} if stage == 2 else {"all-reduce": 2 * size})
    new = rows.get(("all-gather", "weights, after the update"))
    assert (new.bytes if new else 0) == (pytest.approx(size) if stage else 0)
    assert not any(content == BACKWARD for _, content in rows)


def experts_program(rng, capacity_factor):
    """A mixture of 8 experts on 4 devices that exchange, and the bytes of a token's row."""
    embed, layers = 8 * int(rng.integers(2, 9)), int(rng.integers(1, 3))
    sizes = {"vocab": 64, "embed": embed, "layers": layers, "heads": 2, "kv_heads": 2, "mlp": 16}
    model = Mixtral(**sizes, routing=Routing(8, 2))
    options = {"execution": Execution(capacity_factor=capacity_factor), "devices": jax.devices()[:4]}
    made = Program(model, Layout({"expert": 4}), AdamW(Constant(1e-3)), batch=8, seq=16, **options)
    return made, embed, layers


def test_experts_send_each_token_there_and_back_forward_and_backward_and_what_few_loads_need_is_told(rng):
    factor = float(rng.uniform(1, 2))
    program, embed, layers = experts_program(rng, factor)
    result = step_communication(program)
    sent = sum(one.bytes * one.times for one in result.transfers if one.kind == "all-to-all")
    copies, n = 8 // 4 * 16 * 2, 4
    rows = n * math.ceil(factor * copies / n)
    # Rows in the compute dtype, float32 on CPUs. With a row go its weight, that weight's gradient and its expert.
    assert sent == pytest.approx((n - 1) / n * rows * (4 * 4 * embed + 3 * 4) * layers)
    assert factor * copies <= rows < factor * copies + n  # the formula's m · k · B · S, in whole places
    (forward,) = (line for line in result.uncounted if line.endswith("in the forward"))
    (backward,) = (line for line in result.uncounted if line.endswith("in the backward"))
    each = [int(re.search(r"sends ([\d,]+) bytes", line)[1].replace(",", "")) for line in (forward, backward)]
    assert each[0] >= (n - 1) / n * rows * 2 * 4 * embed
    assert each[1] >= 2 * each[0] - 4 * rows * 4, "the backward computes the round again"


@pytest.mark.slow
def test_experts_with_room_for_any_load_send_what_their_program_says(rng):
    program, *_ = experts_program(rng, 4.0)
    assert not any("rounds after the first" in line for line in step_communication(program).uncounted)
    traced, compiled = compared(program)
    assert traced["all-to-all", ("expert",)] == pytest.approx(compiled["all-to-all", ("expert",)])


def test_a_mesh_of_devices_that_are_not_there_is_traced_as_one_of_devices_that_are(seed):
    layout = CLOSE["zero 3 and tensor"]
    here, described = (
        step_communication(random_program(np.random.default_rng(seed), layout, placement=placement))
        for placement in (None, Placement.described(layout, 1))
    )
    assert here == described


def test_on_auto_axes_only_the_collectives_of_manual_regions_are_in_the_program(rng):
    layout = Layout({"data": 4, "tensor": 2}, zero=3, auto=True)
    result = step_communication(random_program(rng, layout))
    assert {part(one.stack) for one in result.transfers} <= {"embedding", "loss"}
    assert WEIGHTS not in {one.source for one in result.transfers}


# ---- reading a compiled program's text -----------------------------------------------------------------------------

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def sent_by(text, mesh):
    """(kind, mesh axes) → bytes that one device sends each time the program runs; `mesh`: mesh axis → size."""
    times, total = _times(text), Counter()
    for computation, line in _lines(text):
        if found := _COLLECTIVE.search(line):
            axes = _mesh_axes(line, mesh)
            ways = math.prod(mesh[a] for a in axes)
            size = sum(
                SIZES.get(d, 4) * math.prod(int(n) for n in s.split(",") if n) for d, s in _ARRAY.findall(found[1])
            )
            whole = size * ways if found[2] == "reduce-scatter" else size
            total[found[2], axes] += times[computation] * sent(found[2], whole, ways)
    return +total


def _lines(text):
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[2]
        else:
            yield computation, line


def _times(text):
    """Computation → how often it runs: a loop's body as often as its known trip count."""
    entry = next(m[2] for m in map(_COMPUTATION.match, text.splitlines()) if m and m[1])
    calls = {}
    for computation, line in _lines(text):
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        for name in _CALLED.findall(line):
            calls.setdefault(computation, []).append((name, int(trips[1]) if trips else 1))
    times, queue = Counter({entry: 1}), [(entry, 1)]
    while queue:
        caller, often = queue.pop()
        for name, trips in calls.get(caller, ()):
            times[name] += often * trips
            queue.append((name, often * trips))
    return times


def _mesh_axes(line, mesh):
    """The mesh axes whose devices take part together: those that vary within the first group."""
    grid = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    places = [np.argwhere(grid == n)[0] for n in _first_group(line)]
    return tuple(a for i, a in enumerate(mesh) if len({int(place[i]) for place in places}) > 1)


def _first_group(line):
    """The devices of one group of a collective, in any of the forms in which XLA writes groups."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return _integers(found[1])
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _numbers(found[2], found[3]).reshape(_integers(found[1]))[0]
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", line
    ):
        names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", found[1]), strict=True)
        numbers = _numbers(found[2] or ",".join(sizes), found[3]).reshape([int(n) for n in sizes])
        return numbers[tuple(slice(None) if f"'{name}'" in found[4] else 0 for name in names)].ravel()
    pairs = re.findall(r"\{(\d+),(\d+)\}", line[line.index("source_target_pairs=") :])
    return next([int(a), int(b)] for a, b in pairs if a != b)


def _numbers(shape, order):
    """The numbers of all devices as an array of a shape, its dimensions put into another order."""
    sizes = _integers(shape)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_integers(order) if order else range(len(sizes)))


def _integers(text):
    return [int(n) for n in text.split(",") if n]
