"""Collective matmul: einsum over a layout with `overlap` is einsum, and its collectives are permutes."""

import collections

import jax
import numpy as np
import pytest

from axon import axes
from axon.axes import einsum, shard
from axon.layout import Layout, Placement
from axon.plan.compiled import collectives

ROWS = {"seq.residual": ("context", "tensor")}
MESHES = [{"tensor": 4}, {"data": 2, "tensor": 4}, {"context": 2, "tensor": 4}, {"context": 2, "tensor": 2}]
UP = "batch seq embed, embed mlp -> batch seq mlp"
DOWN = "batch seq mlp, mlp embed -> batch seq.residual embed"
HEADS = "batch seq embed, embed heads head_dim -> batch seq heads head_dim"


class Weight:
    def __init__(self, value, names):
        self.value, self.axes = value, tuple(names.split())

    def get_value(self):
        return self.value


def feed_forward(x, up, down):
    x = shard(x, "batch seq.residual embed")
    return einsum(DOWN, jax.nn.silu(einsum(UP, x, Weight(up, "embed mlp"))), Weight(down, "mlp embed"))


def plain(x, up, down):
    return jax.nn.silu(x @ up) @ down


def draw(rng):
    embed, mlp = int(rng.integers(3, 9)), 4 * int(rng.integers(1, 4))
    shapes = (4, 8, embed), (embed, mlp), (mlp, embed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def with_gradients(fn, weight):
    def both(*operands):
        return fn(*operands), jax.grad(lambda *o: (fn(*o) * weight).sum(), argnums=(0, 1, 2))(*operands)

    return both


def placed_on(mesh, **layout):
    count = int(np.prod(list(mesh.values())))
    return Placement.of(Layout(mesh, rows=ROWS, **layout), jax.devices()[:count])


@pytest.mark.few(mesh=MESHES[-1:])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_feed_forward_in_rings_and_its_gradients_are_the_formulas(mesh, rng, compiled):
    operands = draw(rng)
    weight = rng.normal(size=operands[0].shape).astype(np.float32)
    made = compiled(placed_on(mesh, overlap=("tensor",)), with_gradients(feed_forward, weight), *operands)
    expected = with_gradients(plain, weight)(*operands)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())


def test_neighbours_that_share_keys_pass_them_on_in_one_ring(rng, compiled):
    placement = placed_on({"tensor": 8}, overlap=("tensor",), replicate_kv=2)
    x, w = rng.normal(size=(4, 8, 6)).astype(np.float32), rng.normal(size=(6, 8, 3)).astype(np.float32)

    def run(x, w):
        return einsum(HEADS, shard(x, "batch seq.residual embed"), Weight(w, "embed heads head_dim"))

    np.testing.assert_allclose(compiled(placement, run, x, w), np.einsum("bse,ehd->bshd", x, w), rtol=1e-4, atol=1e-4)
    assert kinds(placement, run, x, w) == {"collective-permute": 7}


@pytest.mark.parametrize("overlap", [(), ("tensor",)])
def test_gathers_and_reductions_over_the_mesh_axis_become_permutes(overlap, rng):
    found = kinds(placed_on({"tensor": 4}, overlap=overlap), feed_forward, *draw(rng))
    if overlap:
        assert found == {"collective-permute": 2 * 3}
    else:
        assert found["all-gather"] == 1
        assert "collective-permute" not in found


def kinds(placement, fn, *operands):
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
        text = jax.jit(lambda *o: fn(*o)).lower(*operands).compile().as_text()
    return collections.Counter(one.kind for one in collectives(text))
