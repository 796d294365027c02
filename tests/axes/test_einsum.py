"""Patterns, einsum, add and shard: the mathematics of jnp.einsum, wherever a layout puts the arrays."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon import axes
from axon.axes import add, einsum, shard
from axon.axes.patterns import PatternError, base, parse_einsum
from axon.axes.specs import partial_spec
from axon.layout import LayoutError

SIZES = {"batch": 4, "seq": 8, "embed": 8, "heads": 4, "kv_heads": 4, "head_dim": 6, "mlp": 12, "vocab": 16}

WEIGHTED = [
    "batch seq embed, embed mlp -> batch seq mlp",
    "batch seq embed, embed heads head_dim -> batch seq heads head_dim",
    "batch seq heads head_dim, heads head_dim embed -> batch seq embed",
    "batch seq embed, embed -> batch seq embed",
    "batch seq heads head_dim, head_dim -> batch seq heads head_dim",
    "batch seq.residual embed, embed -> batch seq.residual embed",
    "batch seq mlp, mlp embed -> batch seq.residual embed",
    "batch seq embed, vocab embed -> batch seq vocab",
    "batch embed, embed -> batch",
]
BETWEEN_ACTIVATIONS = [
    "batch seq heads head_dim, batch kv_seq heads head_dim -> batch heads seq kv_seq",
    "batch seq embed, batch seq embed -> batch seq",
    "batch seq mlp, batch embed mlp -> batch embed seq",
    "batch embed, batch -> batch embed",
    "batch, embed -> batch embed",
]
MESHES = [
    {"data": 2, "tensor": 2},
    {"data": 4, "tensor": 2},
    {"replica": 2, "context": 2, "tensor": 2},
    {"data": 2, "context": 4},
    {"data": 8 // 2, "x": 2},
]


@dataclass
class Weight:
    """A parameter in the smallest form that `einsum` accepts."""

    value: jax.Array
    axes: tuple[str, ...]

    def get_value(self):
        return self.value


def draw(rng, names):
    sizes = SIZES | {"kv_seq": 8}
    return rng.normal(size=[sizes[base(n)] for n in names]).astype(np.float32)


def letters(pattern):
    """The same pattern as jnp.einsum wants it."""
    parsed = parse_einsum(pattern)
    code = {n: chr(97 + i) for i, n in enumerate(dict.fromkeys(axes.strip_roles(parsed.left + parsed.right)))}
    left, right, out = ("".join(code[base(n)] for n in names) for names in (parsed.left, parsed.right, parsed.out))
    return f"{left},{right}->{out}"


def operands(pattern, rng):
    parsed = parse_einsum(pattern)
    return draw(rng, parsed.left), draw(rng, parsed.right), draw(rng, parsed.out)


def value_and_gradients(product, x, y, weight):
    """`product(x, y)` and the gradients of its inner product with `weight`."""

    def objective(x, y):
        made = product(x, y)
        return jnp.sum(made.astype(jnp.float32) * weight), made

    gradients, made = jax.grad(objective, argnums=(0, 1), has_aux=True)(x, y)
    return made, *gradients


@partial(jax.jit, static_argnums=0)
def plain(pattern, x, y, weight):
    """The same of `jnp.einsum`."""
    return value_and_gradients(lambda x, y: jnp.einsum(letters(pattern), x, y), x, y, weight)


def close(actual, expected, tolerance=2e-6):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= tolerance * max(np.linalg.norm(other), 1e-6)


def random_layout(rng):
    mesh = MESHES[rng.integers(len(MESHES))]
    rows = {"embed": "x"} if "x" in mesh else {}
    if "tensor" in mesh and rng.random() < 0.5:
        rows["seq.residual"] = ("context", "tensor")
    options = {"rows": rows, "order": ("replica", "data", "context", "tensor", "x")}
    return mesh, options | {"zero": int(rng.integers(4)) if "data" in mesh else 0}


# ---- patterns -----------------------------------------------------------------------------------------------------


def test_wrong_ranks_and_sizes_are_refused_with_the_pattern_and_the_sizes():
    x = jnp.ones((2, 3))
    with pytest.raises(PatternError, match=r"names 3 axes, but the array has shape \(2, 3\)"):
        einsum("batch seq embed, embed mlp -> batch seq mlp", x, x)
    with pytest.raises(PatternError, match=r"'seq' is 3 in one operand .* and 2 in the other"):
        einsum("batch seq, seq embed -> batch embed", x, x)
    with pytest.raises(PatternError, match="names 1 axes"):
        shard(x, "batch")


def test_a_parameter_under_a_pattern_of_other_axes_is_refused():
    with pytest.raises(PatternError, match="this parameter's axes are 'mlp embed'"):
        einsum("batch embed, embed mlp -> batch mlp", jnp.ones((2, 3)), Weight(jnp.ones((3, 4)), ("mlp", "embed")))


def test_a_name_that_the_layout_does_not_have_is_refused_with_the_nearest_one(placed, compiled):
    with pytest.raises(LayoutError, match=r"'embedd' is not in the layout's table\. Did you mean 'embed'"):
        compiled(placed({"data": 2}), lambda x: shard(x, "batch embedd"), jnp.ones((2, 2)))


# ---- values and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", WEIGHTED + BETWEEN_ACTIVATIONS)
def test_without_a_layout_einsum_is_jnp_einsum(pattern, rng):
    x, y, weight = operands(pattern, rng)
    ours = lambda x, y: value_and_gradients(lambda x, y: einsum(pattern, x, y), x, y, weight)  # noqa: E731
    close(jax.jit(ours)(x, y), plain(pattern, x, y, weight))


@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize("pattern", WEIGHTED)
def test_a_weights_contraction_and_its_gradients_do_not_depend_on_the_layout(pattern, auto, rng, placed, compiled):
    x, y, weight = operands(pattern, rng)
    names = parse_einsum(pattern).right
    mesh, options = random_layout(rng)
    print(mesh, options)
    placement = placed(mesh, auto=auto, **options)
    stored = jax.device_put(y, placement.sharding(names, "params"))

    def product(x, y):
        return einsum(pattern, shard(x, " ".join(parse_einsum(pattern).left)), Weight(y, names))

    ours = compiled(placement, lambda x, y: value_and_gradients(product, x, y, weight), x, stored)
    close(ours, plain(pattern, x, y, weight))
    assert ours[2].sharding.is_equivalent_to(stored.sharding, y.ndim) or auto


@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize("pattern", BETWEEN_ACTIVATIONS)
def test_a_contraction_of_activations_does_not_depend_on_the_layout(pattern, auto, rng, placed, compiled):
    x, y, weight = operands(pattern, rng)
    mesh, options = random_layout(rng)
    print(mesh, options)
    run = lambda x, y: value_and_gradients(lambda x, y: einsum(pattern, x, y), x, y, weight)  # noqa: E731
    ours = compiled(placed(mesh, auto=auto, **options), run, x, y)
    close(ours, plain(pattern, x, y, weight))


@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize("came", ["batch seq mlp", "batch seq.residual mlp"])
def test_a_bias_is_added_wherever_its_operand_comes_from(came, auto, rng, placed, compiled):
    pattern = "batch seq mlp, mlp -> batch seq mlp"
    x, bias, weight = operands(pattern, rng)
    placement = placed({"data": 2, "context": 2}, rows={"seq.residual": None}, auto=auto)

    def product(x, y):
        return add(pattern, shard(x, came), Weight(y, ("mlp",)))

    run = lambda x, y: value_and_gradients(product, x, y, weight)  # noqa: E731
    expected = jax.jit(lambda x, y: value_and_gradients(lambda x, y: x + y, x, y, weight))(x, bias)
    close(jax.jit(run)(x, bias), expected)
    close(compiled(placement, run, x, bias), expected)


def test_bf16_operands_are_summed_in_float32_and_the_gradient_is_float32(rng, placed, compiled):
    pattern = "batch embed, embed -> batch"
    x, y = rng.uniform(1, 2, (2, 4096)).astype(np.float32), rng.uniform(1, 2, 4096).astype(np.float32)

    def run(x, y):
        made = value_and_gradients(lambda x, y: einsum(pattern, x, Weight(y, ("embed",))), x, y, 1.0)
        assert made[0].dtype == jnp.bfloat16
        assert made[2].dtype == jnp.float32
        return made

    value, _, dy = compiled(placed(), run, x, y, compute=jnp.bfloat16)
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, y)]
    close(value, rounded[0] @ rounded[1], 4e-3)  # the result's own rounding; a bfloat16 sum would stop growing
    close(dy, rounded[0].sum(0), 1e-6)


def test_a_weights_bf16_gradient_is_accumulated_in_float32_over_many_rows(rng, placed, compiled):
    pattern = "batch embed, embed -> batch embed"
    x, y, weight = rng.uniform(1, 2, (4096, 2)), np.ones(2, np.float32), rng.uniform(1, 2, (4096, 2))
    x, weight = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in (x, weight))
    gradient = jax.grad(lambda y: jnp.sum(einsum(pattern, x, Weight(y, ("embed",))).astype(jnp.float32) * weight))
    made = compiled(placed({"data": 4}), gradient, y, compute=jnp.bfloat16)
    close(made, (x.astype(np.float64) * weight).sum(0), 1e-6)


# ---- where arrays live --------------------------------------------------------------------------------------------


def test_a_weight_that_owes_sums_gets_an_unreduced_gradient_that_comes_out_right(rng, placed, compiled):
    x, y, weight = operands(WEIGHTED[0], rng)

    def run(x, y):
        owing = jax.sharding.reshard(y, PartitionSpec(None, None, reduced={"data"}))
        gradient = jax.grad(lambda y: jnp.sum(einsum(WEIGHTED[0], x, Weight(y, ("embed", "mlp"))) * weight))(owing)
        assert jax.typeof(gradient).sharding.spec.unreduced == {"data"}
        return axes.reshard(gradient, PartitionSpec(None, None))

    close(compiled(placed({"data": 4}), run, x, y), np.einsum("bse,bsm->em", x, weight))


def test_a_partial_gradient_times_a_scalar_stays_partial(rng, placed, compiled):
    x = rng.normal(size=(8, 3)).astype(np.float32)

    def run(x, factor):
        summed = partial_spec(PartitionSpec(None), ("data",))
        local = axes.per_device(lambda x: jnp.sum(x, axis=0), (PartitionSpec("data", None),), summed)
        scaled = axes.scaled(local(shard(x, "batch embed")), factor)
        assert jax.typeof(scaled).sharding.spec.unreduced == {"data"}
        return axes.reshard(scaled, PartitionSpec(None))

    close(compiled(placed({"data": 4}), run, x, jnp.float32(1.7)), 1.7 * x.sum(0))


@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize("remat", [False, True])
def test_the_gathered_weight_is_never_saved(remat, auto, rng, placed, compiled):
    """What the backward keeps of a weight that is stored split is the stored shard, in its stored dtype."""
    x, y, _ = operands(WEIGHTED[0], rng)
    placement = placed({"data": 4}, zero=3, auto=auto)
    stored = jax.device_put(y, placement.sharding(("embed", "mlp"), "params"))
    kept = []

    def run(x, y):
        call = lambda x, y: einsum(WEIGHTED[0], x, Weight(y, ("embed", "mlp")))  # noqa: E731
        saves_all = jax.checkpoint_policies.everything_saveable
        call = jax.checkpoint(call, policy=saves_all) if remat else call
        _, backward = jax.vjp(call, shard(x, "batch seq embed"), y)
        kept.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(backward))
        return jax.tree.leaves(backward)

    compiled(placement, run, x, stored, compute=jnp.bfloat16)
    weights = [t for t in kept if t.shape == y.shape]
    assert len(weights) == 1
    assert weights[0].dtype == jnp.float32
    if not auto:
        assert weights[0].sharding.spec == PartitionSpec("data", None)


def test_two_layouts_on_one_mesh_each_get_their_own_sharding(placed, compiled):
    """JAX caches traces by function identity: what `einsum` hands to it must still be traced for each."""

    def run(x, y):
        return einsum("batch seq embed, embed mlp -> batch seq mlp", x, Weight(y, ("embed", "mlp")))

    found = {}
    for row in ("tensor", None):
        placement = placed({"data": 2, "tensor": 2}, rows={"mlp": row, "embed": None})
        out = compiled(placement, run, jnp.ones((4, 2, 8)), jnp.ones((8, 12)))
        found[row] = out.sharding.spec
    assert tuple(found["tensor"]) == ("data", None, "tensor")
    assert tuple(found[None])[:1] == ("data",)
    assert "tensor" not in tuple(found[None])


def test_shard_moves_an_array_and_is_nothing_where_it_lies_there_or_no_layout_is_in_force(placed, compiled):
    x = jnp.arange(32.0).reshape(8, 4)
    assert shard(x, "batch embed") is x
    placement = placed({"data": 4})
    out = compiled(placement, lambda x: shard(x, "batch embed"), x)
    assert out.sharding.is_equivalent_to(NamedSharding(placement.mesh, PartitionSpec("data", None)), 2)

    def again(x):
        once = shard(x, "batch embed")
        assert shard(once, "batch embed") is once
        return once

    np.testing.assert_array_equal(compiled(placement, again, x), x)


def test_shard_of_another_kind_uses_that_kinds_rows(placed, compiled):
    placement = placed({"data": 4}, zero=1)
    out = compiled(placement, lambda x: shard(x, "embed mlp", "optimizer"), jnp.ones((8, 4)))
    assert out.sharding.spec[0] == "data"


@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
def test_per_device_sums_what_devices_owe(auto, rng, placed, compiled):
    x = rng.normal(size=(8, 3)).astype(np.float32)

    def run(x):
        summed = partial_spec(PartitionSpec(None), ("data",))
        out = axes.per_device(lambda x: jnp.sum(x, axis=0), (PartitionSpec("data", None),), summed)(
            shard(x, "batch embed")
        )
        return axes.reshard(out, PartitionSpec(None))

    close(compiled(placed({"data": 4}, auto=auto), run, x), x.sum(0))
    close(compiled(placed(auto=auto), run, x), x.sum(0))


def test_choices_are_collected_in_the_scope_in_force_and_forgotten_outside(placed):
    axes.log_choice("topic", "outside")
    with axes.activate(axes.Scope(placed())) as scope:
        axes.log_choice("topic", "inside")
    assert scope.choices == {"topic": "inside"}
    assert axes.current() is None


def test_different_choices_of_one_topic_are_all_kept_and_the_same_is_said_once(placed):
    with axes.activate(axes.Scope(placed())) as scope:
        for text in ("xla, causal", "xla, causal & window 4", "xla, causal", "xla"):
            axes.log_choice("attention", text)
        axes.log_choice("layers", "scanned")
    assert scope.choices == {"attention": "xla, causal; also xla, causal & window 4; also xla", "layers": "scanned"}


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=["one device", "tensor"])
def test_a_position_has_the_same_bits_however_many_there_are_if_so_many_are_worked_on_at_once(mesh, rng, placed):
    """Without `row_block` a CPU takes another kernel for another number of rows, with its own order of additions."""
    placement = placed(mesh)
    x, w = rng.normal(size=(1, 128, 384)).astype(np.float32), rng.normal(size=(384, 640)).astype(np.float32)
    pattern = "batch seq embed, embed mlp -> batch seq mlp"

    def product(count, rows):
        scope = axes.Scope(placement, row_block=rows)
        with jax.set_mesh(placement.mesh), axes.activate(scope):
            run = jax.jit(lambda x, w: einsum(pattern, shard(x, "batch seq embed"), Weight(w, ("embed", "mlp"))))
            return np.asarray(run(x[:, :count], shard(jnp.asarray(w), "embed mlp", "params")))[0]

    alone = product(16, 16)
    for count in (32, 128):
        np.testing.assert_array_equal(product(count, 16)[:16], alone)
    np.testing.assert_allclose(product(128, 16), product(128, None), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=["one device", "tensor"])
@pytest.mark.parametrize(("of", "to"), [("embed", "mlp"), ("mlp", "embed")], ids=["split by columns", "split by terms"])
def test_positions_of_no_use_are_not_computed(mesh, of, to, rng, placed):
    """Of the blocks of `row_block` positions those that begin before `count` are, with the bits that they have."""
    placement = placed(mesh)
    left, right, out = f"batch seq {of}", f"{of} {to}", f"batch seq {to}"
    x, w = rng.normal(size=(1, 64, 48)).astype(np.float32), rng.normal(size=(48, 32)).astype(np.float32)

    def product(count):
        def run(x, w, count):
            with axes.valid_rows(count) if count is not None else nullcontext():
                return einsum(f"{left}, {right} -> {out}", shard(x, left), Weight(w, (of, to)))

        with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement, row_block=16)):
            w_placed = shard(jnp.asarray(w), right, "params")
            return np.asarray(jax.jit(run)(jnp.asarray(x), w_placed, count))[0]

    whole = product(None)
    for count in (0, 1, 16, int(rng.integers(17, 64)), 64):
        found, computed = product(count), -(-count // 16) * 16
        np.testing.assert_array_equal(found[:computed], whole[:computed])
        assert not found[computed:].any()
