"""Weights in 4 bits: their codes by the formula, and products and adapters over the array that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import einsum
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn.lora import LoRA
from axon.nn.param import parameters
from axon.nn.quantized import Quantize
from axon.nn.weight_transform import transform_weights
from axon.plan.flops import bodies_of
from axon.precision.codebook import INT4, normal_float, packed, unpacked
from axon.runtime import Runtime, flattened, nested
from axon.serve.logits import logits
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=64, layers=2, heads=4, kv_heads=2, mlp=128)
WIDE = Llama(vocab=64, embed=512, layers=1, heads=4, kv_heads=2, mlp=512)
"""Of which two devices have whole blocks of scales."""
BITSANDBYTES_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""As that library publishes them, of which the quantiles were made otherwise."""


def test_the_numbers_of_nf4_are_those_of_its_library():
    np.testing.assert_allclose(normal_float().numbers, BITSANDBYTES_NF4, atol=3e-7)


@pytest.mark.parametrize("book", [normal_float(), INT4], ids=["nf4", "int4"])
def test_each_number_becomes_the_nearest_of_its_block_and_two_share_a_byte(book, rng):
    x = rng.normal(size=(3, 128, 5)).astype(np.float32)
    x[0, :32] = 0
    codes, scales = jax.jit(lambda x: packed(x, -2, 32, book))(x)
    assert (codes.shape, codes.dtype, scales.shape) == ((3, 64, 5), jnp.uint8, (3, 4, 5))
    largest = np.abs(x).reshape(3, 4, 32, 5).max(axis=2)
    np.testing.assert_allclose(scales, largest / book.most, rtol=1e-6)
    wide = np.repeat(np.maximum(scales, 1e-30), 32, axis=1)
    nearest = np.abs(np.float64(x / wide)[..., None] - book.numbers).min(axis=-1)
    error = np.abs(np.asarray(unpacked(codes, scales, -2, book)) - x) / wide
    np.testing.assert_allclose(error, nearest, atol=2e-6)


def test_layers_keep_nothing_of_a_weights_size_for_their_decoding():
    model = Llama(vocab=8, embed=512, layers=3, heads=4, kv_heads=4, mlp=2048)
    options = {"transforms": (Quantize("nf4"), LoRA(rank=1)), "execution": Execution(remat="full", unroll=False)}
    program = Program(model, Layout(), AdamW(Constant(1e-2)), batch=8, seq=8, **options)
    weights, loops = 4 * 512 * 2048, list(scans(program.trace().jaxpr.jaxpr))
    assert len(loops) >= 2
    for loop in loops:
        sizes = [x.aval.size * x.aval.dtype.itemsize for x in loop.invars]
        assert max(sizes) < weights, sizes


def scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in bodies_of(equation.params):
            yield from scans(inner)


def values_of(runtime, rng):
    """Random values of a runtime's model: those stored, nested by path, and those that they stand for, by path."""
    drawn = {p: rng.normal(size=s.shape).astype(np.float32) * 0.1 for p, s in runtime.declared.items()}
    stored = nested({path: runtime.derived(path, value) for path, value in drawn.items()})
    return stored, jax.device_get(runtime.merged(flattened(stored)))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("form", ["nf4", "int4"])
def test_logits_are_those_of_the_array_that_the_codes_stand_for(form, rng):
    narrow = Runtime(MODEL, Layout(), weights=form, devices=jax.devices()[:1])
    plain = Runtime(MODEL, Layout(), devices=jax.devices()[:1])
    stored, wide = values_of(narrow, rng)
    tokens = rng.integers(0, 64, (2, 16), dtype=np.int32)
    wide = jax.device_put(nested(wide), jax.NamedSharding(plain.placement.mesh, jax.P()))
    found, expected = logits(narrow, stored, {}, tokens), logits(plain, wide, {}, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_nf4_takes_4_13_bits_and_counts_the_same_flops():
    narrow, plain = (Runtime(Llama(64, 512, 2, 4, 4, mlp=1024), Layout(), weights=w) for w in ("nf4", jnp.bfloat16))
    for path in narrow.operands:
        numbers = np.prod(narrow.declared[path].shape)
        held = sum(spec.nbytes for name, spec in narrow.parameters.items() if name.startswith(f"{path}/"))
        assert 4.12 < 8 * held / numbers < 4.26, path  # scales of scales are of all outputs, where there are fewer
    assert narrow.module.flops_per_token(32) == plain.module.flops_per_token(32)


LAYOUTS = {"one": Layout({"data": 1}), "tensor": Layout({"tensor": 2}), "zero 3": Layout({"data": 2}, zero=3)}


@pytest.mark.full
@pytest.mark.few(layout=(LAYOUTS["one"],))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_adapters_over_4_bits_learn_as_over_the_array_and_the_base_stays(layout, rng, packed_batch):
    lora = LoRA(rank=4)

    def program(layout, transforms):
        options = {"batch": 4, "seq": 16, "devices": jax.devices()[: int(np.prod([*layout.mesh.values()]))]}
        return Program(WIDE, layout, AdamW(Constant(1e-2), eps=1e-4), transforms=transforms, **options)

    base = Runtime(WIDE, Layout(), weights="nf4", devices=jax.devices()[:1])
    stored, wide = values_of(base, rng)
    narrow, plain = program(layout, (Quantize("nf4"), lora)), program(LAYOUTS["one"], (lora,))
    start = jax.device_get(flattened(plain.init().parameters))
    adapters = {path: x for path, x in start.items() if path.rpartition("/")[2] in ("a", "b")}
    own = flattened(jax.device_get(stored))
    of_narrow = {p: adapters[p] if p in adapters else own[p.replace("/base/", "/")] for p in narrow.parameters}
    of_plain = {p: adapters[p] if p in adapters else wide[p.removesuffix("/base")] for p in plain.parameters}
    states = [narrow.init(nested(of_narrow)), plain.init(nested(of_plain))]
    for batch in [packed_batch(rng, 4, 16, 64) for _ in range(3)]:
        made = [one.step(state, one.place(batch)) for one, state in zip((narrow, plain), states, strict=True)]
        states = [state for state, _ in made]
        losses = [float(metrics["loss"]) for _, metrics in made]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    after, expected = (jax.device_get(flattened(state.parameters)) for state in states)
    for path, value in after.items():
        if path in adapters:
            error = np.linalg.norm(value - expected[path])
            assert error <= 1e-3 * np.linalg.norm(expected[path] - adapters[path]), path
        else:
            np.testing.assert_array_equal(value, of_narrow[path], err_msg=path)
    held = {str(key) for path, _ in jax.tree_util.tree_leaves_with_path(states[0].optimizer) for key in path}
    assert not any("codes" in key or "scales" in key for key in held)


def test_blocks_that_do_not_divide_are_refused_by_axis():
    with pytest.raises(UserError, match=r"blocks of 64 do not divide the axis 'embed' of 96.*Quantize.paths"):
        transform_weights(Llama(64, 96, 1, 4, 4, mlp=128).build(), [Quantize("nf4")])


@pytest.mark.full
@pytest.mark.draws(1)
def test_without_a_layout_a_product_is_that_of_the_array(rng):
    module = MODEL.build()
    operands = transform_weights(module, [Quantize("nf4")])
    path = next(path for path in operands if path.endswith("mlp/up"))
    operand, spec = operands[path], parameters(MODEL.build())[path]
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in (spec.shape, (2, 3, 64)))
    parts = operand.derived(jnp.asarray(w))
    for name, part in parts.items():
        vars(operand)[name].set_value(part[1])
    found = einsum("batch seq embed, embed mlp -> batch seq mlp", x, operand)
    np.testing.assert_allclose(found, x @ np.asarray(operand.merged(parts))[1], rtol=1e-4, atol=1e-4)
