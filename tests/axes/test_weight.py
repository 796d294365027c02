"""The door through which weights are used: what passes it, what is kept, and weights that are more than an array."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import add, einsum, shard
from axon.axes.patterns import PatternError

UP = "batch seq embed, embed mlp -> batch seq mlp"
DOWN = "batch seq mlp, mlp embed -> batch seq.residual embed"
HEADS = "batch seq embed, embed heads head_dim -> batch seq heads head_dim"
SIZES = {"batch": 4, "seq": 8, "embed": 8, "mlp": 12, "heads": 4, "head_dim": 6, "rank": 2}
LAYOUTS = [
    ({"data": 2, "tensor": 2}, {"zero": 3, "rows": {"rank": None}}),
    ({"data": 2, "tensor": 2}, {"zero": 3, "rows": {"rank": None}, "auto": True}),
    ({"data": 2, "tensor": 2}, {"zero": 3, "rows": {"rank": None, "seq.residual": "tensor"}, "overlap": ("tensor",)}),
]


@dataclass
class Weight:
    """A parameter in the smallest form that `einsum` accepts."""

    value: jax.Array
    axes: tuple[str, ...]

    def get_value(self):
        return self.value


@dataclass
class LoRA:
    """W + A·B (Hu et al., arXiv:2106.09685): the sum of matrices is never made, but of their products with `x`."""

    frozen: Weight
    down: Weight
    up: Weight

    @property
    def axes(self):
        return self.frozen.axes

    def contract(self, contraction, x):
        inner = [n for n in contraction.left if n not in self.down.axes] + ["rank"]
        left, down, inner, up, out = (
            " ".join(names) for names in (contraction.left, self.down.axes, inner, self.up.axes, contraction.out)
        )
        low = einsum(f"{left}, {down} -> {inner}", x, self.down)
        return einsum(contraction.text, x, self.frozen) + einsum(f"{inner}, {up} -> {out}", low, self.up)


@dataclass
class Scaled:
    """Integers, and a scale for each output: the scales follow the product, so that the matrix is never made whole."""

    values: Weight
    scales: Weight

    @property
    def axes(self):
        return self.values.axes

    def contract(self, contraction, x):
        out, scales = " ".join(contraction.out), " ".join(self.scales.axes)
        return einsum(f"{out}, {scales} -> {out}", einsum(contraction.text, x, self.values), self.scales)


def draw(rng, names):
    return rng.normal(size=[SIZES[n] for n in names]).astype(np.float32)


def close(actual, expected, tolerance=2e-6):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def stored(placement, value, names):
    return jax.device_put(value, placement.sharding(names, "params"))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def traced(placement, fn, *args):
    scope = axes.Scope(placement)
    with jax.set_mesh(placement.mesh), axes.activate(scope):
        return list(equations(jax.make_jaxpr(lambda *args: fn(*args))(*args).jaxpr))


# ---- weights that are more than an array ----------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
@pytest.mark.parametrize("pattern", [UP, DOWN, HEADS])
def test_a_pair_of_adapters_is_the_plain_mathematics_on_every_layout(pattern, mesh, options, rng, placed, compiled):
    parsed = axes.parse_einsum(pattern)
    summed = tuple(n for n in parsed.right if n in parsed.left)
    names = {
        "frozen": parsed.right,
        "down": (*summed, "rank"),
        "up": ("rank", *(n for n in parsed.right if n not in summed)),
    }
    x, out = draw(rng, axes.strip_roles(parsed.left)), draw(rng, axes.strip_roles(parsed.out))
    values = {name: draw(rng, own) for name, own in names.items()}
    placement = placed(mesh, **options)
    placed_values = {name: stored(placement, value, names[name]) for name, value in values.items()}

    def ours(x, trained, frozen):
        arrays = {"frozen": frozen, **trained}
        pair = LoRA(**{name: Weight(arrays[name], names[name]) for name in names})
        return jnp.sum(jnp.square(einsum(pattern, shard(x, " ".join(parsed.left)), pair) + out))

    def plain(x, trained, frozen):
        low = jnp.tensordot(x, trained["down"], 1)
        return jnp.sum(jnp.square(jnp.tensordot(x, frozen, 1) + jnp.tensordot(low, trained["up"], 1) + out))

    frozen, trained = placed_values.pop("frozen"), placed_values
    made = compiled(placement, lambda *args: jax.value_and_grad(ours, (0, 1))(*args), x, trained, frozen)
    own = {name: values[name] for name in trained}
    close(made, jax.jit(jax.value_and_grad(plain, (0, 1)))(x, own, values["frozen"]), 1e-5)


@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_scaled_integers_are_the_plain_mathematics_on_every_layout_and_move_as_integers(
    mesh, options, rng, placed, compiled
):
    x, out, scales = draw(rng, ("batch", "seq", "embed")), draw(rng, ("batch", "seq", "mlp")), draw(rng, ("mlp",))
    values = rng.integers(-127, 128, (8, 12), dtype=np.int8)
    placement = placed(mesh, **options)

    def ours(x, scales, values):
        weight = Scaled(Weight(values, ("embed", "mlp")), Weight(scales, ("mlp",)))
        return jnp.sum(jnp.square(einsum(UP, shard(x, "batch seq embed"), weight) + out))

    def plain(x, scales):
        return jnp.sum(jnp.square(x @ (values * scales) + out))

    args = x, stored(placement, scales, ("mlp",)), stored(placement, values, ("embed", "mlp"))
    made = compiled(placement, lambda *args: jax.value_and_grad(ours, (0, 1))(*args), *args)
    close(made, jax.jit(jax.value_and_grad(plain, (0, 1)))(x, scales), 1e-5)
    if placement.explicit:
        moved = [e.invars[0].aval for e in traced(placement, ours, *args) if e.primitive.name == "reshard"]
        assert {a.dtype.name for a in moved if a.shape == values.shape} == {"int8"}


def test_a_weight_of_another_form_is_refused_where_an_array_is_needed(rng):
    pair = Scaled(Weight(draw(rng, ("embed", "mlp")), ("embed", "mlp")), Weight(draw(rng, ("mlp",)), ("mlp",)))
    with pytest.raises(PatternError, match=r"add\(.* is given a Scaled, a weight that brings its own contraction"):
        add("embed mlp, embed mlp -> embed mlp", jnp.ones((8, 12)), pair)
    with pytest.raises(PatternError, match="this parameter's axes are 'embed mlp'"):
        einsum(DOWN, jnp.ones((4, 8, 12)), pair)


# ---- one weight -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["array", "parameter"])
@pytest.mark.parametrize("operation", [einsum, add])
def test_a_weight_as_first_operand_is_refused_with_the_pattern_to_write(operation, other):
    weight = Weight(jnp.ones((8, 12)), ("embed", "mlp"))
    second = Weight(jnp.ones(12), ("mlp",)) if other == "parameter" else jnp.ones(12)
    told = r"the first operand of 'embed mlp, mlp -> embed mlp' is a parameter \(its axes are 'embed mlp'\).*"
    with pytest.raises(PatternError, match=told + r"swap the two and write 'mlp, embed mlp -> embed mlp'"):
        operation("embed mlp, mlp -> embed mlp", weight, second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_weight_is_gathered_in_the_narrower_of_its_own_dtype_and_the_compute_dtype(dtype, rng, placed):
    placement = placed({"data": 4}, zero=3)
    narrow = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]  # the compute dtype
    weight = stored(placement, jnp.asarray(draw(rng, ("embed", "mlp")), dtype), ("embed", "mlp"))
    scope = axes.Scope(placement, compute=jnp.dtype(narrow))
    with jax.set_mesh(placement.mesh), axes.activate(scope):
        run = lambda x, w: einsum(UP, x, Weight(w, ("embed", "mlp")))  # noqa: E731
        found = list(equations(jax.make_jaxpr(run)(jnp.ones((4, 8, 8)), weight).jaxpr))
    gathers = [e.invars[0].aval for e in found if e.primitive.name == "reshard" and e.invars[0].aval.shape == (8, 12)]
    assert [a.dtype.name for a in gathers] == ["bfloat16"]


def test_a_weight_that_is_not_trained_has_no_gradient_made(rng, placed):
    placement = placed({"data": 2, "tensor": 2}, zero=3)
    x, w = draw(rng, ("batch", "seq", "embed")), stored(placement, draw(rng, ("embed", "mlp")), ("embed", "mlp"))
    loss = lambda x, w: jnp.sum(einsum(UP, x, Weight(w, ("embed", "mlp"))))  # noqa: E731

    def products(argnums):
        found = traced(placement, jax.grad(loss, argnums), x, w)
        return sorted(e.outvars[0].aval.size for e in found if e.primitive.name == "dot_general")

    result, of_x, of_weight = 4 * 8 * 12, 4 * 8 * 8, 8 * 12
    assert products((0, 1)) == [of_weight, of_x, result]
    assert products(0) == [of_x, result]


def test_an_operation_of_ones_own_goes_through_the_door(rng, placed, compiled):
    """Squared weights: what is asked of an operation is a result and gradients that may be partial sums."""

    class Squared(axes.Operation):
        spec = PartitionSpec(None, None)

        def forward(self, weight, *operands):
            (x,) = operands
            return x @ weight.gathered(self.spec) ** 2, x

        def backward(self, weight, saved, cotangent):
            w = weight.gathered(self.spec)
            dw = jnp.einsum("be,bm->em", saved, cotangent, out_sharding=self.spec) * 2 * w
            return dw, cotangent @ (w * w).T

    x, w, out = draw(rng, ("batch", "embed")), draw(rng, ("embed", "mlp")), draw(rng, ("batch", "mlp"))
    placement = placed({"data": 4}, zero=3)

    def ours(x, w):
        made = axes.use_weight(axes.current(), Squared(), w, shard(x, "batch embed"))
        return jnp.sum(jnp.square(made + shard(out, "batch mlp")))

    weight = stored(placement, w, ("embed", "mlp"))
    made = compiled(placement, lambda x, w: jax.value_and_grad(ours, (0, 1))(x, w), x, weight)
    close(made, jax.value_and_grad(lambda x, w: jnp.sum(jnp.square(x @ w**2 + out)), (0, 1))(x, w), 1e-5)
    assert made[1][1].sharding.is_equivalent_to(weight.sharding, 2)


@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_a_layer_in_the_stack_of_all_is_that_layers_weight(mesh, options, rng, placed, compiled):
    names, placement = ("embed", "mlp"), placed(mesh, **options)
    stack, x = draw(rng, ("heads", *names)), draw(rng, ("batch", "seq", "embed"))
    layers = stored(placement, stack, ("layers", *names))

    def up(layers, number, x):
        return einsum(UP, shard(x, "batch seq embed"), Weight(axes.LayerWeight(layers, number), names))

    for number in rng.permutation(len(stack))[:2]:
        close(compiled(placement, up, layers, jnp.int32(number), x), x @ stack[number])
