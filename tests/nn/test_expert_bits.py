"""Experts' weights in few bits: what is computed with them is that of the arrays that they stand for, on any layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.grouped_matmul import decoding_grouped_product, grouped_matmul_reference
from axon.layout import Execution, Layout
from axon.nn import Routing
from axon.nn.lora import LoRA
from axon.nn.quantized import FOUR_BITS, Quantize
from axon.precision.codebook import packed, unpacked
from axon.runtime import Runtime, flattened, nested
from axon.serve.logits import logits
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.mixtral import Mixtral

MODEL = Mixtral(vocab=64, embed=128, layers=2, heads=4, kv_heads=2, mlp=256, routing=Routing(4, 2))
ONE = Layout({"data": 1})
LAYOUTS = {
    "one": ONE,
    "experts and zero 3": Layout({"data": 2, "expert": 2}, zero=3),
    "experts and tensor": Layout({"expert": 2, "tensor": 2}),
}


def values_of(runtime, rng):
    """Random values of a runtime's model, those stored, and those that they stand for; by path."""
    drawn = {p: rng.normal(size=s.shape).astype(np.float32) * 0.1 for p, s in runtime.declared.items()}
    own = flattened(nested({path: runtime.derived(path, value) for path, value in drawn.items()}))
    return jax.device_get(own), jax.device_get(runtime.merged(own))


@pytest.mark.few(form=())
@pytest.mark.parametrize("form", ["nf4", "int4", "mxfp4"])
def test_logits_are_those_of_the_experts_that_the_codes_stand_for(form, rng):
    narrow, plain = (Runtime(MODEL, Layout(), weights=w, devices=jax.devices()[:1]) for w in (form, None))
    stored, wide = values_of(narrow, rng)
    tokens = rng.integers(0, 64, (2, 16), dtype=np.int32)
    place = jax.NamedSharding(plain.placement.mesh, jax.P())
    found, expected = (
        logits(runtime, jax.device_put(nested(values), place), plain.initialise_variables(0), tokens)
        for runtime, values in ((narrow, stored), (plain, wide))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert any("moe" in path for path in narrow.operands)


@pytest.mark.full
@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_adapters_over_them_learn_as_over_the_arrays_in_several_rounds_too(form, layout, rng, packed_batch):
    def program(layout, transforms):
        devices = jax.devices()[: int(np.prod([*layout.mesh.values()]))]
        execution = Execution(capacity_factor=1.0, remat="full", unroll=False)
        options = {"batch": 4, "seq": 16, "devices": devices, "execution": execution}
        return Program(MODEL, layout, AdamW(Constant(1e-2), eps=1e-4), transforms=transforms, **options)

    own, wide = values_of(Runtime(MODEL, ONE, weights=form, devices=jax.devices()[:1]), rng)
    narrow, plain = program(layout, (Quantize(form), LoRA(rank=4))), program(ONE, (LoRA(rank=4),))
    drawn = {p: rng.normal(size=s.shape).astype(np.float32) / 9 for p, s in plain.parameters.items() if p[-2:] != "se"}
    states = [
        narrow.init(nested({p: drawn[p] if p in drawn else own[p.replace("/base", "")] for p in narrow.parameters})),
        plain.init(nested({p: drawn[p] if p in drawn else wide[p.removesuffix("/base")] for p in plain.parameters})),
    ]
    for batch in [packed_batch(rng, 4, 16, 64) for _ in range(2)]:
        made = [one.step(state, one.place(batch)) for one, state in zip((narrow, plain), states, strict=True)]
        states = [state for state, _ in made]
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(*(float(metrics[name]) for _, metrics in made), rtol=1e-5)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_decodes_one_groups_weight_at_a_time(transposed, rng):
    groups, rows, embed, out = 16, 64, 256, 128
    book, scale = FOUR_BITS["nf4"].book, rng.random((groups, 4, out), np.float32)
    w = rng.normal(size=(groups, embed, out)).astype(np.float32)
    codes, _ = packed(jnp.asarray(w), -2, 64, book)
    stacked = jnp.concatenate([codes, codes[::-1]])
    sizes = np.int32(rng.multinomial(rows - 5, [1 / groups] * groups))
    x = rng.normal(size=(rows, out if transposed else embed)).astype(np.float32)

    def product(x, stacked, scale, sizes):
        parts = stacked, scale
        decode = lambda codes, scales: unpacked(codes, scales, -2, book)  # noqa: E731
        return decoding_grouped_product(x, parts, decode, sizes, groups, transposed=transposed)

    compiled = jax.jit(product).lower(x, stacked, scale, sizes).compile()
    found = compiled(x, stacked, scale, sizes)
    whole = unpacked(codes[::-1], scale, -2, book)
    expected = grouped_matmul_reference(x, jnp.swapaxes(whole, 1, 2) if transposed else whole, sizes)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(expected))))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < groups * embed * out * 4 / 4
