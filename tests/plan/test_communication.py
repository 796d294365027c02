"""The collectives read from traced programs, against what was written into them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from axon.plan.communication import ACTIVATION_GRADIENTS, UPDATES, WEIGHT_GRADIENTS, communication
from axon.plan.traffic import WEIGHTS, content

P = PartitionSpec
MESH = AbstractMesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def found(fn, *arguments, inputs=(), mesh=MESH):
    """The collectives of `fn` on arguments (shape, spec)."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec)) for s, spec in arguments]
    with jax.sharding.use_abstract_mesh(mesh):
        return communication(jax.jit(fn).trace(*shapes).jaxpr.jaxpr, inputs)


def told(result):
    return [(one.kind, one.mesh_axes, one.bytes, one.times) for one in result.transfers]


@pytest.fixture
def sizes(rng):
    """Three multiples of 8."""
    return [8 * int(n) for n in rng.integers(1, 20, 3)]


def test_a_product_over_a_split_axis_is_summed_where_its_result_says(sizes):
    m, k, n = sizes
    operands = ((m, k), P(None, "data")), ((k, n), P("data", None))
    whole = found(lambda a, b: jnp.einsum("mk,kn->mn", a, b, out_sharding=P()), *operands)
    assert told(whole) == [("all-reduce", ("data",), 2 * 3 / 4 * 4 * m * n, 1)]
    cut = found(lambda a, b: jnp.einsum("mk,kn->mn", a, b, out_sharding=P("data")), *operands)
    assert told(cut) == [("reduce-scatter", ("data",), 3 / 4 * 4 * m * n, 1)]
    later = found(lambda a, b: jnp.einsum("mk,kn->mn", a, b, out_sharding=P(unreduced={"data"})), *operands)
    assert told(later) == []


def layer(x, up, down):
    """Two matrix products, the first split over `tensor`, the second summed over it."""
    inner = jnp.einsum("bd,df->bf", x, up, out_sharding=P("data", "tensor"))
    return jnp.einsum("bf,fd->bd", jnp.sin(inner), down, out_sharding=P("data"))


def trained(layers, x):
    """A step of gradient descent through a loop of layers."""

    def loss(layers):
        with jax.named_scope("model"):
            return jnp.sum(jnp.square(lax.scan(lambda x, own: (layer(x, *own), None), x, layers)[0]))

    gradients = jax.grad(loss)(layers)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
    return tuple(w - 0.1 * jnp.sign(g) / norm for w, g in zip(layers, gradients, strict=True))


def test_a_sum_is_told_by_where_it_comes_from_and_where_it_goes(sizes):
    b, d, f = sizes
    count = 3
    split = ((count, d, f), P(None, None, "tensor")), ((count, f, d), P(None, "tensor"))

    result = found(
        lambda up, down, x: trained((up, down), x), *split, ((b, d), P("data")), inputs=(WEIGHTS, WEIGHTS, "batch")
    )
    sums = {(one.mesh_axes, content(one)): one.bytes * one.times for one in result.transfers}
    assert sums.pop((("tensor",), "activations, forward")) == count * 2 * 1 / 2 * 4 * b // 4 * d
    assert sums.pop((("tensor",), ACTIVATION_GRADIENTS)) == count * 2 * 1 / 2 * 4 * b // 4 * d
    of_weights = 2 * 3 / 4 * 4 * d * f // 2
    assert sums.pop((("data",), WEIGHT_GRADIENTS)) == count * of_weights
    assert {what for _, what in sums} <= {"norms and metrics", "activations, forward"}, "single numbers"
    assert max(sums.values()) <= 2 * 8


def test_a_weight_that_is_moved_is_a_weight_wherever_and_what_replaces_it_an_update(sizes):
    _, m, n = sizes

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.einsum("mn,m->n", jax.sharding.reshard(w, P()), x)))(w)
        return jax.sharding.reshard(w, P("tensor")), jax.sharding.reshard(w * gradient, P(None, "data"))

    result = found(step, ((m, n), P("data")), ((m,), P()), inputs=(WEIGHTS, ""))
    assert [content(one) for one in result.transfers if one.bytes > 8] == [
        "weights, forward",
        "weights, after the update",
        UPDATES,
    ]


def test_a_loops_collectives_count_as_often_as_it_runs_and_one_move_twice_asked_for_counts_once(sizes):
    _, k, n = sizes

    def layers(x, weights):
        def layer(x, w):
            again = jax.sharding.reshard(w, P(None, None)).sum() * 0
            return x @ jax.sharding.reshard(w, P(None, None)) + again, None

        return lax.scan(layer, x, weights)[0]

    result = found(layers, ((n, k), P("tensor")), ((5, k, k), P(None, "data", None)), inputs=("", WEIGHTS))
    assert told(result) == [("all-gather", ("data",), 3 / 4 * 4 * k * k, 5)]
    assert result.transfers[0].source == WEIGHTS


def test_collectives_inside_a_shard_map_count_with_local_shapes(sizes):
    m, n, _ = sizes

    def local(x):
        x = lax.ppermute(lax.pmax(x, "tensor"), "data", [(i, (i + 1) % 4) for i in range(4)])
        x = lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)
        x = lax.all_gather(x, "data", axis=1, tiled=True)
        return lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])

    def fn(x):
        return jax.shard_map(local, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"), check_vma=False)(x)

    size = 4 * (4 * m // 4) * (8 * n // 2)
    assert told(found(fn, ((4 * m, 8 * n), P("data", "tensor")))) == [
        ("all-reduce", ("tensor",), 2 * 1 / 2 * size, 1),
        ("collective-permute", ("data",), size, 1),
        ("reduce-scatter", ("data",), 3 / 4 * size, 1),
        ("all-gather", ("data",), 3 / 4 * size, 1),
        ("all-reduce", ("data",), 2 * 1 / 2 * size, 1),
    ]


def test_a_collective_can_overlap_the_products_that_neither_make_it_nor_need_it(sizes):
    m, k, _ = sizes

    def fn(x, v, w):
        before = x @ v
        gathered = jax.sharding.reshard(w, P(None, None))
        return before @ gathered, jax.sharding.reshard(before, P(None, None))

    weight, result = found(fn, ((m, k), P("tensor")), ((k, k), P()), ((k, k), P("data"))).transfers
    assert (weight.mesh_axes, weight.overlappable) == (("data",), 0.5)  # the product before it; the one after it waits
    assert (result.mesh_axes, result.overlappable) == (("tensor",), 0.5)  # the one after it; the one before makes it


def test_a_while_loop_is_told_as_not_counted(sizes):
    def fn(x):
        def body(x):
            return jax.sharding.reshard(jax.sharding.reshard(x, P()), P("data")) / 2

        return lax.while_loop(lambda x: jax.sharding.reshard(x, P())[0, 0] > 1, body, x)

    result = found(fn, ((sizes[0], sizes[1]), P("data")))
    assert {one.kind for one in result.transfers} == {"all-gather"}
    assert "'while'" in result.uncounted[0]
