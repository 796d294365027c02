"""What narrow formats, adapters and the host's memory change in a prediction, beside the program's own declarations."""

import math

import pytest
from planning import mixture, program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.nn.lora import LoRA
from axon.nn.quantized import Quantize
from axon.nn.router import Routing
from axon.plan.memory import arguments, least_memory
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import kept, memory
from axon.plan.predict.seconds import ELEMENTWISE, EXPERTS, GRADIENTS, HEAD, HOST, PRODUCTS, UPDATE, WEIGHTS, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.precision import FP8Current, Int8, Precision
from axon.train.optimizers import AdamW, Constant
from models.mixtral import Mixtral

WIDE = {"embed": 256, "mlp": 512}
ADAPTED = {"lora": (LoRA(rank=4),), "qlora": (Quantize("nf4"), LoRA(rank=4))}


def shards(work, devices=8, host=(), remat="full", **fields):
    layout = Layout(**{"mesh": {"data": devices}, "zero": 3} | fields)
    return Shards(Split(work, Placement.described(layout, devices, "tpu")), layout, Execution(remat=remat, host=host))


def work(**parts):
    return Work.of(program(**WIDE, **parts))


def on(name):
    return Target.of(name, dict(CHIPS))


@pytest.fixture(scope="module")
def plain():
    return work()


@pytest.fixture(scope="module", params=ADAPTED)
def adapted(request):
    return work(transforms=ADAPTED[request.param])


@pytest.fixture(scope="module")
def rounded():
    return work(precision=Precision(recipe=Int8()))


def test_what_is_frozen_has_no_gradient_and_no_state(plain, adapted):
    layout = Layout(mesh={"data": 8}, zero=3)
    real = least_memory(adapted.program, Placement.described(layout, 8, "tpu"))
    found = memory(shards(adapted)).parts
    for kind in ("parameters", "optimizer", "gradients"):
        assert found[kind] == pytest.approx(real[kind], rel=1e-3)
    assert found["gradients"] < kept(shards(plain))["gradients"] / 4


def test_a_backward_through_frozen_weights_is_half_as_long(plain, adapted):
    (whole,), (frozen,) = plain.periods, adapted.periods
    assert whole.backward == pytest.approx(2)
    assert 1 < frozen.backward < 1.4  # attention and adapters have both halves
    times = [seconds(shards(one), on("v5e:2x4")) for one in (plain, adapted)]
    assert times[1].of(HEAD) == pytest.approx(2 / 3 * times[0].of(HEAD))
    assert times[1].of(UPDATE) < times[0].of(UPDATE) / 2
    total = frozen.times * frozen.forward * (1 + frozen.backward) + adapted.head
    assert total == pytest.approx(adapted.program.flops_per_token, rel=1e-3)


def test_two_adapters_at_once_have_the_weights_of_one_of_twice_the_rank():
    (wide,), (both,) = (work(transforms=(one,)).periods for one in (LoRA(rank=8), LoRA(rank=4, adapters=("a", "b"))))
    sizes = [sum(math.prod(spec.shape) for spec in one.weights.values()) for one in (wide, both)]
    assert sizes[0] == sizes[1]


def test_codes_are_gathered_as_they_are_stored(plain):
    """NF4: half a byte a number, and a scale of a byte for each 64 numbers, for 2 bytes in bfloat16."""
    narrow = work(transforms=ADAPTED["qlora"])
    sizes = [sum(one.size for one in shards(each).split.weights[0]) for each in (plain, narrow)]
    adapters = sum(math.prod(s.shape[1:]) for p, s in narrow.periods[0].weights.items() if p.endswith(("/a", "/b")))
    assert sizes[1] - 2 * adapters == pytest.approx(sizes[0] * 4.127 / 16, rel=0.02)


def test_a_recipe_gathers_a_byte_a_number_and_keeps_its_inputs_in_8_bits(plain, rounded):
    wide, narrow = (shards(one).split for one in (plain, rounded))
    sizes = [sum(one.size for one in each.weights[0]) for each in (wide, narrow)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.01)
    assert rounded.periods[0].none.kept.of(1, 1, 1) < plain.periods[0].none.kept.of(1, 1, 1)
    for kind in ("parameters", "optimizer", "gradients"):
        assert kept(shards(rounded))[kind] == kept(shards(plain))[kind]


@pytest.mark.full
@pytest.mark.draws(1)
def test_of_experts_operands_are_rounded_that_are_of_a_tokens_copies():
    found = {n: work(family=Mixtral, routing=Routing(n, 2), precision=Precision(recipe=Int8())) for n in (4, 8)}
    elements = [one.periods[0].rounded_elements for one in found.values()]
    assert elements[0] == elements[1] > 2 * 3 * (WIDE["embed"] + WIDE["mlp"])


def test_products_of_a_recipe_take_less_time_and_rounding_takes_some(plain, rounded):
    wide, narrow = (seconds(shards(one), on("v5e:2x4")) for one in (plain, rounded))
    assert wide.of(PRODUCTS) / 1.6 < narrow.of(PRODUCTS) < 0.8 * wide.of(PRODUCTS)  # attention stays
    assert narrow.of(ELEMENTWISE) > 0.9 * wide.of(ELEMENTWISE)
    assert narrow.of(HEAD) == wide.of(HEAD)


def test_patterns_of_a_recipe_say_which_products_are_narrow():
    some = work(precision=Precision(recipe=FP8Current(paths=("layers/*/mlp/*",))))
    (period,) = some.periods
    assert period.narrow * period.forward == 2 * 3 * WIDE["embed"] * WIDE["mlp"]
    assert period.rounded_elements == 3 * (WIDE["embed"] + WIDE["mlp"])


def test_layers_that_a_recipe_leaves_are_as_without(plain, rounded):
    half = work(precision=Precision(recipe=Int8(first=1, last=1)))  # of 4
    assert half.periods[0].narrow == pytest.approx(rounded.periods[0].narrow / 2)
    assert half.periods[0].rounded_elements == pytest.approx(rounded.periods[0].rounded_elements / 2)
    sizes = [sum(one.size for one in shards(each).split.weights[0]) for each in (plain, half, rounded)]
    assert sizes[1] == pytest.approx((sizes[0] + sizes[2]) / 2)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_recipe_sends_rows_to_experts_a_byte_a_number():
    """One of the four exchanges of a layer, in half the bytes."""
    large, fields = {"embed": 4096, "batch": 64, "seq": 1024, "layers": 1}, {"remat": "none", "mesh": {"expert": 4}}
    times = []
    for recipe in (None, Int8()):
        found = Work.of(mixture(precision=Precision(recipe=recipe), **large))
        times.append(seconds(shards(found, 4, **fields), on("v5e:2x2")).of(EXPERTS))
    assert times[1] == pytest.approx(3.5 / 4 * times[0], rel=0.01)


@pytest.mark.parametrize("moments", ["bfloat16", "dynamic8"])
def test_moments_take_what_they_are_stored_in(moments):
    one = Work.of(program(**WIDE, optimizer=AdamW(Constant(1e-3), moments=moments)))
    real = arguments(one.program, Placement.described(Layout(mesh={"data": 8}, zero=3), 8, "tpu"))
    assert kept(shards(one))["optimizer"] == pytest.approx(real["optimizer"], rel=1e-3)


def test_state_on_the_host_is_not_on_the_device_and_is_sent_both_ways(plain):
    here, away = shards(plain), shards(plain, host=("optimizer",))
    state = kept(here)["optimizer"]
    assert "optimizer" not in kept(away)
    assert kept(here) == kept(away) | {"optimizer": state}
    target = on("v5e:2x4")
    line = seconds(away, target).of(HOST)
    assert line == pytest.approx(state / Bandwidths.of(target).host)
    assert seconds(here, target).of(HOST) == 0
    assert seconds(away, target).of(GRADIENTS, WEIGHTS) == seconds(here, target).of(GRADIENTS, WEIGHTS)
