"""Layers at both ends that a recipe leaves: each layer's products are by hand those that they should be."""

import math
import re

import jax
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn import Inputs, Routing
from axon.nn.low_precision import with_recipe
from axon.precision import FP8Current, FP8Delayed, Int8, Precision
from axon.runtime import Runtime, flattened, nested
from axon.train.optimizers import SGD, Constant
from axon.train.step import Program
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.llama import Llama

SIZES = {"vocab": 64, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48}
LAYERS, FIRST, LAST = 4, 1, 2
RECIPE = FP8Current(emulate=True)
SOME = FP8Current(emulate=True, first=FIRST, last=LAST)
LAYOUTS = {
    "one": Layout({"data": 1}),
    "zero 3": Layout({"data": 2}, zero=3),
    "tensor": Layout({"data": 2, "tensor": 2}, zero=3),
}
BATCH, SEQ = 4, 8


def runtime(recipe, layout=LAYOUTS["one"], layers=LAYERS, model=Llama, **execution):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    transforms = with_recipe(recipe, ())
    return Runtime(
        model(layers=layers, **SIZES), layout, execution=Execution(**execution), transforms=transforms, devices=devices
    )


def drawn(rng):
    """Values of the parameters by their paths in the model, `x`, and a cotangent of the same shape."""
    specs = runtime(None).parameters
    values = {p: rng.normal(1 - s.decay, s.shape[1] ** -0.5, s.shape) for p, s in specs.items() if "layers" in p}
    values |= {p: np.ones(s.shape) for p, s in specs.items() if "layers" not in p}
    x, dy = rng.normal(size=(2, BATCH, SEQ, SIZES["embed"]))
    return {p: v.astype(np.float32) for p, v in values.items()}, np.float32(x), np.float32(dy)


def placed(of, values):
    """Values for a runtime, which may have them in operands."""
    paths = {path: f"{path}/base" if path in of.operands else path for path in values}
    place = of.placement.sharding
    return {q: jax.device_put(values[p], place(of.parameters[q].axes, "params")) for p, q in paths.items()}


def with_gradients(of, run, values, x, dy):
    """`run(values, x)`, and the gradients for both, by the paths in the model."""
    x, dy = (jax.device_put(one, of.placement.sharding(("batch", "seq", "embed"))) for one in (x, dy))

    def both(values, x, dy):
        y, backward = jax.vjp(run, values, x)
        return y, *backward(dy)

    with of.tracing():
        y, dvalues, dx = jax.device_get(of.jit(both)(values, x, dy))
    return {"y": y, "dx": dx} | {path.removesuffix("/base"): value for path, value in dvalues.items()}


def inputs():
    documents = np.zeros((BATCH, SEQ), np.int32)
    return Inputs(documents, documents, documents)


def through_layers(of, *operands):
    values, *others = operands
    return with_gradients(
        of, lambda values, x: of.bind(nested(values)).layers(x, inputs())[0], placed(of, values), *others
    )


def by_hand(excepted):
    """The same of models of one layer, one after the other, each with the recipe or without: one of them, and a way to
    run all."""
    plain, rounded = (runtime(recipe, layers=1) for recipe in (None, RECIPE))

    def run(values, x):
        for number in range(LAYERS):
            of = plain if number in excepted else rounded
            own = {path: v[number : number + 1] if path.startswith("layers/") else v for path, v in values.items()}
            own = {f"{path}/base" if path in of.operands else path: value for path, value in own.items()}
            x, _, _ = of.bind(nested(own)).layers(x, inputs())
        return x

    return plain, run


def error(actual, expected):
    return max(
        np.linalg.norm(actual[path] - expected[path]) / np.linalg.norm(expected[path])
        for path in expected
        if path in ("y", "dx") or path.startswith("layers/")
    )


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "execution",
    [{"unroll": False}, {"unroll": True}, {"unroll": False, "remat": "full"}],
    ids=["scanned", "unrolled", "remat"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_and_last_layers_are_a_plain_model_s_and_the_others_the_recipe_s(layout, execution, rng):
    operands = drawn(rng)
    actual = through_layers(runtime(SOME, LAYOUTS[layout], **execution), *operands)
    assert error(actual, with_gradients(*by_hand({0, 2, 3}), *operands)) < 2e-3
    of, run = by_hand({0, 3})
    values, x, _ = operands
    with of.tracing():
        y = jax.device_get(of.jit(run)(values, jax.device_put(x, of.placement.sharding(("batch", "seq", "embed")))))
    assert error(actual, {"y": y}) > 1e-2


def program(recipe, layout=LAYOUTS["one"], model=Llama(layers=LAYERS, **SIZES), **execution):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    options = {"precision": Precision(recipe=recipe), "execution": Execution(**execution), "devices": devices}
    return Program(model, layout, SGD(Constant(0.1)), batch=BATCH, seq=SEQ, **options)


def stepped(of, batch):
    """The parameters after a step, and its metrics."""
    state, metrics = of.step(of.init(), of.place(batch))
    return jax.device_get((flattened(state.parameters), metrics, flattened(state.variables)))


@pytest.mark.full
def test_microbatches_and_shards_change_nothing(rng, packed_batch):
    batch = packed_batch(rng, BATCH, SEQ, SIZES["vocab"])
    layout = Layout({"data": 2}, zero=3, microbatches=2)
    (one, _, _), (many, _, _) = (
        stepped(program(SOME, of, unroll=unroll), batch) for of, unroll in ((LAYOUTS["one"], True), (layout, False))
    )
    for path, value in one.items():
        assert np.linalg.norm(many[path] - value) < 1e-4 * np.linalg.norm(value)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("ends", "paths"),
    [({"last": 2}, "layers/dense/*"), ({"first": 2}, ("layers/experts/*", "!*/router/*"))],
    ids=["dense alone", "experts alone"],
)
def test_layers_are_counted_over_all_kinds_and_experts_are_left_too(ends, paths):
    """So a recipe that leaves one kind's layers, which are two, makes the program that one makes with the other's
    paths."""
    sizes = {"embed": 32, "mlp": 48, "expert_mlp": 48, "q_latent": 16, "kv_latent": 12}
    heads = {"heads": 4, "nope_dim": 6, "rope_dim": 4, "value_dim": 8}
    model = DeepSeek(64, layers=4, first_dense=2, routing=Routing(4, 2), shared=16, **sizes, **heads)
    ended, named, whole = (
        re.sub("0x[0-9a-f]+", "", str(program(FP8Current(emulate=True, **fields), model=model).trace().jaxpr))
        for fields in (ends, {"paths": paths}, {})
    )
    assert ended == named != whole


def test_a_segment_is_cut_where_one_of_its_period_s_layers_differs():
    """Of 3 × (local, full) and a last one the recipe leaves a local one, and full with last."""
    of = program(Int8(emulate=True, first=1, last=2), model=Gemma(layers=7, window=4, head_dim=8, **SIZES))
    of.trace()
    periods = ", ".join("1 × local + full unrolled" for _ in range(3))
    assert of.choices["layers"].startswith(f"{periods}, 1 × last unrolled")


@pytest.mark.full
def test_what_is_left_records_nothing(rng, packed_batch):
    of = program(FP8Delayed(emulate=True, first=FIRST, last=LAST))
    _, _, variables = stepped(of, packed_batch(rng, BATCH, SEQ, SIZES["vocab"]))
    recorded = np.max(variables["layers/block/mlp/up/amax"], axis=(1, 2))
    np.testing.assert_array_equal(recorded > 0, [False, True, False, False])


def test_the_log_says_how_many_layers_stay_and_how_the_others_run():
    of = program(Int8(emulate=True, first=FIRST, last=LAST), unroll=False)
    assert of.choices["weights"].startswith("Int8, emulated, without the first 1 and last 2 layers: 7 of 12 parameters")
    of.trace()
    assert of.choices["layers"].startswith("1 × block unrolled, 1 × block unrolled, 2 × block scanned")


@pytest.mark.parametrize(
    ("fields", "layout", "message"),
    [
        ({"first": 2, "last": 2}, LAYOUTS["one"], r"Int8.first = 2 and Int8.last = 2: .* 4 layers"),
        ({"last": 6}, LAYOUTS["one"], r"Int8.last = 6: .* 4 layers"),
        ({"first": 1}, Layout({"pipe": 2}, microbatches=2, pad_layers=True), r"Int8.first = 1 .*'pipe'"),
    ],
    ids=["none left", "more than there are", "pipeline"],
)
def test_what_cannot_be_left_is_refused(fields, layout, message):
    with pytest.raises(UserError, match=message):
        program(Int8(emulate=True, **fields), layout)


def test_a_negative_number_is_refused():
    with pytest.raises(UserError, match=r"FP8Delayed.last is -1"):
        FP8Delayed(last=-1)
