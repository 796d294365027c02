"""LoRA: an adapted weight is W + scale · A·B wherever the model uses it, and nothing else of the model trains."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes import base, einsum
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Embedding, Param, Routing, cross_entropy, fan_in, token_nll
from axon.nn.head import Head
from axon.nn.lora import LoRA
from axon.nn.quantized import Quantize
from axon.nn.weight_transform import transform_weights
from axon.runtime import Runtime, flattened, nested
from models.llama import Llama
from models.mixtral import Mixtral

LLAMA = Llama(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
MIXTRAL = Mixtral(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, routing=Routing(4, 2))
DIMS = {"vocab": 11, "embed": 8, "heads": 3, "head_dim": 5, "experts": 4, "mlp": 6}
SCALE = 16 / 2
ADAPT = LoRA("*", rank=2)


class Holder(nnx.Module):
    """A module with one weight."""

    def __init__(self, axes: str, inputs: str):
        self.weight = Param(axes, DIMS, fan_in(inputs))


def adapted(axes, inputs, rng):
    """An adapted weight with random parts, and the plain W + scale · A·B."""
    holder = Holder(axes, inputs)
    transform_weights(holder, [ADAPT])
    weight = holder.weight
    for part in (weight.base, weight.a, weight.b):
        part.set_value(jnp.asarray(rng.normal(size=part.get_value().shape), jnp.float32))
    return weight


def plain(base_value, a, b, weight):
    """W + scale · A·B."""
    letters = dict(zip((*weight.axes, "rank"), "abcdefg", strict=False))
    of = lambda names: "".join(letters[name] for name in names)  # noqa: E731
    product = jnp.einsum(f"{of(weight.a.axes)},{of(weight.b.axes)}->{of(weight.axes)}", a, b)
    return base_value + SCALE * product


def numbers(pattern):
    """A pattern as NumPy has it."""
    names = sorted({base(name) for name in pattern.replace(",", "").replace("->", "").split()})
    letters = dict(zip(names, "abcdefghij", strict=False))
    sides = pattern.replace("->", ",").split(",")
    left, right, out = ("".join(letters[base(name)] for name in side.split()) for side in sides)
    return f"{left},{right}->{out}"


@pytest.mark.parametrize(
    ("pattern", "inputs"),
    [
        ("batch seq embed, embed heads head_dim -> batch seq heads head_dim", "embed"),
        ("batch seq heads head_dim, heads head_dim embed -> batch seq embed", "heads head_dim"),
        ("batch seq heads head_dim, embed heads head_dim -> batch seq heads embed", "embed"),
        ("batch seq heads, embed heads head_dim -> batch seq embed head_dim", "embed"),
        ("batch seq embed, vocab embed -> batch seq vocab", "vocab"),
        ("batch seq embed.expert, experts embed.expert mlp.expert -> batch seq experts mlp.expert", "embed.expert"),
        ("batch seq experts mlp.expert, experts mlp.expert embed.expert -> batch seq embed.expert", "mlp.expert"),
    ],
)
def test_a_product_and_its_gradients_are_those_of_the_sum(pattern, inputs, rng):
    weight = adapted(pattern.partition(",")[2].partition("->")[0].strip(), inputs, rng)
    sizes = {"batch": 2, "seq": 3} | DIMS
    x = rng.normal(size=[sizes[base(name)] for name in pattern.partition(",")[0].split()]).astype(np.float32)
    graph, _ = nnx.split(weight)
    parts = [weight.base.get_value(), weight.a.get_value(), weight.b.get_value()]

    def ours(x, a, b):
        return einsum(pattern, x, nnx.merge(graph, {"base": parts[0], "a": a, "b": b}))

    def wanted(x, a, b):
        return jnp.einsum(numbers(pattern), x, plain(parts[0], a, b, weight))

    with jax.default_matmul_precision("highest"):
        y, back = jax.vjp(jax.jit(ours), x, *parts[1:])
        exact, back_exact = jax.vjp(jax.jit(wanted), x, *parts[1:])
        ct = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
        for one, other in zip((y, *back(ct)), (exact, *back_exact(ct)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(other))))


def test_a_table_is_looked_up_and_a_head_has_the_losses_of_the_sum(rng):
    table = Embedding("vocab", DIMS, 0.5)
    transform_weights(table, [ADAPT])
    for part in (table.table.base, table.table.a, table.table.b):
        part.set_value(jnp.asarray(rng.normal(size=part.get_value().shape), jnp.float32))
    weight = table.table
    whole = plain(weight.base.get_value(), weight.a.get_value(), weight.b.get_value(), weight)
    ids, x = rng.integers(0, 11, (2, 3)), rng.normal(size=(2, 3, 8)).astype(np.float32)
    np.testing.assert_allclose(table(ids), whole[ids], rtol=1e-5, atol=1e-4)
    weights = np.ones(ids.shape, np.float32)
    exact = Head(Param("vocab embed", DIMS))
    exact.matrix.set_value(whole)
    for loss, more in ((token_nll, ()), (cross_entropy, (weights,))):
        found, wanted = (loss(x, head, ids, *more) for head in (Head(weight), exact))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)


def product(runtime, path, a, b):
    """A·B of a weight's stored factors, in float64."""
    names = *(runtime.parameters[f"{path}/{factor}"].axes for factor in "ab"), runtime.declared[path].axes
    letters = {name: chr(97 + at) for at, name in enumerate(dict.fromkeys(name for one in names for name in one))}
    left, right, out = ("".join(letters[name] for name in one) for one in names)
    return np.einsum(f"{left},{right}->{out}", np.float64(a), np.float64(b))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
@pytest.mark.parametrize("form", [None, "int8", "nf4"])
def test_the_merged_weights_are_the_adapted_model_which_begins_as_the_model(model, form, rng):
    from axon.serve.logits import logits

    layout, tokens = Layout({"data": 1}), rng.integers(0, 64, (2, 8)).astype(np.int32)
    device = jax.devices()[:1]
    wide = Runtime(model, layout, devices=device)
    first = () if form is None else (Quantize(form),)
    narrow = Runtime(model, layout, transforms=(*first, LoRA(rank=4)), devices=device)
    initial, variables = wide.initialise(3)
    values = flattened(initial)
    made = flattened(nested({path: narrow.derived(path, value) for path, value in values.items()}))
    made |= flattened(narrow.initialise_parameters(3, [p for p in narrow.parameters if p not in made]))
    start = narrow.merged(made)
    step = {None: 0, "int8": 0.005, "nf4": 0.16}[form]  # half of what two neighbouring codes differ by, at most
    for path, value in values.items():
        np.testing.assert_allclose(start[path], value, atol=step * float(jnp.max(jnp.abs(value))))
    drawn = {p: jnp.asarray(rng.normal(size=x.shape), x.dtype) / 9 if p.endswith("/b") else x for p, x in made.items()}
    merged = narrow.merged(drawn)
    for path, weight in merged.items():
        a, b = (drawn.get(f"{path}/{name}") for name in "ab")
        exact = start[path] if a is None else start[path] + 16 / 4 * product(narrow, path, a, b)
        np.testing.assert_allclose(weight, exact, rtol=1e-6, atol=1e-6, err_msg=path)
    ours, exact = logits(narrow, nested(drawn), variables, tokens), logits(wide, nested(merged), variables, tokens)
    largest = float(np.max(np.abs(exact)))
    assert float(np.max(np.abs(ours - exact))) <= 1e-5 * largest
    assert float(np.max(np.abs(ours - logits(wide, nested(start), variables, tokens)))) > 0.05 * largest


def test_only_the_adapters_train_and_what_is_said_to():
    runtime = Runtime(LLAMA, Layout({"data": 1}), transforms=(LoRA(others="*norm*"),), devices=jax.devices()[:1])
    trained = {path for path, spec in runtime.parameters.items() if spec.trained}
    assert trained == {path for path in runtime.parameters if path.endswith(("/a", "/b")) or "norm" in path}
    assert {path.rpartition("/")[0] for path in trained if path.endswith("/a")} == set(runtime.operands)
    assert not any(path.startswith(("embedding", "head")) for path in runtime.operands)


@pytest.mark.parametrize(
    ("transforms", "field", "remedy"),
    [
        ((LoRA("layers/*/gat"),), "LoRA.paths", "layers/block/mlp/gate"),
        ((LoRA("*norm*"),), "LoRA.paths", "no matrix"),
        ((LoRA(others="nrm/*"),), "LoRA.others", "norm/scale"),
        ((LoRA(), Quantize("int8")), "Quantize", "put Quantize before"),
        ((LoRA("*/key", rank=17),), "LoRA.rank is 17", "16 × 8"),
    ],
)
def test_a_transform_that_takes_nothing_or_comes_too_late_is_refused(transforms, field, remedy):
    with pytest.raises(UserError) as found:
        transform_weights(LLAMA.build(), transforms)
    assert field in str(found.value)
    assert remedy in str(found.value)


def test_no_flops_are_counted_for_gradients_of_the_base():
    seq, plain = 16, Runtime(LLAMA, Layout({"data": 1}), devices=jax.devices()[:1])
    runtime = Runtime(LLAMA, Layout({"data": 1}), transforms=(LoRA(rank=2),), devices=jax.devices()[:1])
    frozen = {path for path, spec in runtime.parameters.items() if not spec.trained}
    forward = sum(plain.module.flops_by_part(seq).values())

    def flops(*endings):
        return sum(2 * math.prod(s.shape) for p, s in runtime.parameters.items() if p.endswith(endings))

    adapters, base_, head = flops("/a", "/b"), flops("/base"), flops("head")
    attention = forward - base_ - head
    found = runtime.module.flops_per_token(seq, frozenset(frozen)) - 3 * adapters
    assert plain.module.flops_per_token(seq) == 3 * forward
    most = 2 * (base_ + head) + 3 * attention  # the first layer's own inputs need no gradient
    assert most - base_ // LLAMA.layers <= found <= most


def test_a_base_in_bfloat16_takes_half_the_bytes():
    wide, narrow = (
        Runtime(LLAMA, Layout({"data": 1}), transforms=(replace(LoRA(), base=kind),), devices=jax.devices()[:1])
        for kind in (None, "bfloat16")
    )
    for path in wide.operands:
        assert wide.parameters[f"{path}/base"].nbytes == 2 * narrow.parameters[f"{path}/base"].nbytes
        assert wide.parameters[f"{path}/a"].nbytes == narrow.parameters[f"{path}/a"].nbytes
