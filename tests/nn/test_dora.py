"""DoRA: an adapted weight is magnitude · V / ‖V‖, V = W + scale · A·B, with ‖V‖ a constant in the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes import base, einsum
from axon.layout import Layout
from axon.nn import Embedding, Param, Routing, fan_in
from axon.nn.lora import LoRA
from axon.nn.quantized import Quantize
from axon.nn.weight_transform import transform_weights
from axon.runtime import Runtime, flattened, nested
from axon.serve.logits import logits
from models.llama import Llama
from models.mixtral import Mixtral

LLAMA = Llama(vocab=64, embed=128, layers=1, heads=4, kv_heads=2, mlp=128)
MIXTRAL = Mixtral(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, routing=Routing(4, 2))
DIMS = {"vocab": 11, "embed": 8, "heads": 3, "head_dim": 5, "experts": 4, "mlp": 6}
SCALE = 16 / 2
DORA = LoRA("*", rank=2, dora=True)


class Holder(nnx.Module):
    """A module with one weight."""

    def __init__(self, axes: str, inputs: str):
        self.weight = Param(axes, DIMS, fan_in(inputs))


def with_values(weight, rng):
    """Its parts by name, float64, drawn; `norm` is that of the base."""
    parts = {name: rng.normal(size=vars(weight)[name].get_value().shape) for name in ("base", "a", "b", "magnitude")}
    over = tuple(i for i, name in enumerate(weight.axes) if name in weight.inputs)
    parts["norm"] = np.sqrt(np.sum(parts["base"] ** 2, over))
    for name, value in parts.items():
        vars(weight)[name].set_value(jnp.asarray(value, jnp.float32))
    return parts


def reference(weight, parts):
    """V, and magnitude / ‖V‖ as it multiplies V."""
    letters = dict(zip((*weight.axes, "rank"), "abcdefg", strict=False))
    of = lambda names: "".join(letters[name] for name in names)  # noqa: E731
    low = np.einsum(f"{of(weight.a.axes)},{of(weight.b.axes)}->{of(weight.axes)}", parts["a"], parts["b"])
    over = tuple(i for i, name in enumerate(weight.axes) if name in weight.inputs)
    v = parts["base"] + SCALE * low
    norm = np.sqrt(np.sum(v**2, over, keepdims=True))
    return v, np.expand_dims(parts["magnitude"], over) / norm, norm, of, over


def letters(pattern):
    names = sorted({base(name) for name in pattern.replace(",", "").replace("->", "").split()})
    letter = dict(zip(names, "abcdefghij", strict=False))
    return ["".join(letter[base(name)] for name in side.split()) for side in pattern.replace("->", ",").split(",")]


@pytest.mark.parametrize(
    ("pattern", "inputs"),
    [
        ("batch seq heads head_dim, heads head_dim embed -> batch seq embed", "heads head_dim"),
        ("batch seq heads head_dim, embed heads head_dim -> batch seq heads embed", "embed"),
        ("batch seq heads, embed heads head_dim -> batch seq embed head_dim", "embed"),
        ("batch seq embed.expert, experts embed.expert mlp.expert -> batch seq experts mlp.expert", "embed.expert"),
    ],
)
def test_a_product_and_its_gradients_are_the_formulas(pattern, inputs, rng):
    holder = Holder(pattern.partition(",")[2].partition("->")[0].strip(), inputs)
    transform_weights(holder, [DORA])
    weight = holder.weight
    parts = with_values(weight, rng)
    sizes = {"batch": 2, "seq": 3} | DIMS
    x = rng.normal(size=[sizes[base(name)] for name in pattern.partition(",")[0].split()])
    v, factor, norm, of, over = reference(weight, parts)
    left, right, out = letters(pattern)
    exact = np.einsum(f"{left},{right}->{out}", x, factor * v)
    ct = rng.normal(size=exact.shape)
    whole = np.einsum(f"{left},{out}->{right}", x, ct)  # the gradient of the weight
    a, b, w = (of(names) for names in (weight.a.axes, weight.b.axes, weight.axes))
    gradients = (
        np.einsum(f"{out},{right}->{left}", ct, factor * v),
        SCALE * np.einsum(f"{w},{b}->{a}", factor * whole, parts["b"]),
        SCALE * np.einsum(f"{w},{a}->{b}", factor * whole, parts["a"]),
        np.sum(whole * v / norm, over),
    )
    graph, _ = nnx.split(weight)

    def ours(x, a, b, magnitude):
        values = {"a": a, "b": b, "magnitude": magnitude} | {
            n: jnp.asarray(parts[n], jnp.float32) for n in ("base", "norm")
        }
        return einsum(pattern, x, nnx.merge(graph, values))

    with jax.default_matmul_precision("highest"):
        operands = [jnp.asarray(one, jnp.float32) for one in (x, parts["a"], parts["b"], parts["magnitude"])]
        y, back = jax.vjp(jax.jit(ours), *operands)
        found = back(jnp.asarray(ct, jnp.float32))
    for one, other in zip((y, *found), (exact, *gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.max(np.abs(other)))


def test_a_table_is_looked_up_as_the_formula_has_it_and_read_whole(rng):
    table = Embedding("vocab", DIMS, 0.5)
    transform_weights(table, [DORA])
    v, factor, *_ = reference(table.table, with_values(table.table, rng))
    ids = rng.integers(0, 11, (2, 3))
    np.testing.assert_allclose(table(ids), (factor * v)[ids], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(table.table.whole(), factor * v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "first"),
    [
        pytest.param(LLAMA, (), id="llama", marks=pytest.mark.full),
        pytest.param(LLAMA, (Quantize("nf4"),), id="nf4", marks=pytest.mark.full),
        pytest.param(MIXTRAL, (Quantize("int8"),), id="int8 experts", marks=pytest.mark.full),
    ],
)
def test_it_begins_as_the_base_and_is_the_merged_weights(model, first, rng):
    layout, tokens = Layout({"data": 1}), rng.integers(0, 64, (2, 8)).astype(np.int32)
    device = jax.devices()[:1]
    wide = Runtime(model, layout, devices=device)
    narrow = Runtime(model, layout, transforms=(*first, LoRA(rank=4, dora=True)), devices=device)
    bare = Runtime(model, layout, transforms=first, devices=device)
    initial, variables = wide.initialise(3)
    values = flattened(initial)
    made = flattened(nested({path: narrow.derived(path, value) for path, value in values.items()}))
    own = {path.replace("/base", ""): value for path, value in made.items()}
    made |= flattened(narrow.initialise_parameters(3, [p for p in narrow.parameters if p not in made]))
    if not first:
        drawn = flattened(narrow.initialise(3)[0])
        for path, value in drawn.items():
            np.testing.assert_allclose(made[path], value, rtol=1e-6, err_msg=path)
    plain = nested({path: own[path] for path in bare.parameters})
    begun = logits(narrow, nested(made), variables, tokens)
    np.testing.assert_allclose(begun, logits(bare, plain, variables, tokens), atol=1e-5)

    def moved(path, x):
        if path.endswith("/b"):
            return jnp.asarray(rng.normal(size=x.shape), x.dtype) / 9
        return x * rng.uniform(0.5, 2, x.shape).astype(x.dtype) if path.endswith("/magnitude") else x

    now = {path: moved(path, x) for path, x in made.items()}
    ours = logits(narrow, nested(now), variables, tokens)
    np.testing.assert_allclose(ours, logits(wide, nested(narrow.merged(now)), variables, tokens), rtol=1e-4, atol=1e-4)
    assert float(np.max(np.abs(ours - begun))) > 0.1
