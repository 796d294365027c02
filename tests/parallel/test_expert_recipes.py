"""Experts' products by a recipe, beside the formula in float64: forward and both gradients, on every layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.errors import UserError
from axon.parallel.expert import ExpertMesh, Matrix, Products
from axon.precision import MXFP8, FP8Block, FP8Current, Int8

RECIPES = {
    "int8": Int8(emulate=True),
    "tensor": FP8Current(emulate=True),
    "row": FP8Current(share="row", emulate=True),
    "block": FP8Block(emulate=True),
    "mx": MXFP8(emulate=True),
}
BOUNDS = {"int8": 2**-6, "tensor": 2**-3, "row": 2**-3, "block": 2**-4, "mx": 2**-3.5}
"""Of an error's norm beside that of the product, as of plain products."""

EXPERTS, EMBED, MLP, ROWS = 4, 256, 512, 300
ONE, MANY = {"data": 1}, {"data": 2, "expert": 2, "tensor": 2}


class Experts:
    """Rows of random experts, each expert's and each row's of a magnitude of its own; matrices and cotangents."""

    def __init__(self, rng):
        self.expert = np.sort(rng.choice([0, 1, 3], ROWS))  # expert 2 has no row
        magnitude = 10.0 ** rng.uniform(-2, 2, EXPERTS)
        self.w = rng.normal(size=(EXPERTS, EMBED, MLP)) * magnitude[:, None, None]
        self.x, self.dy = (rng.normal(size=(ROWS, size)) * 10.0 ** rng.uniform(-1, 1) for size in (EMBED, MLP))
        self.device = rng.integers(0, 2, ROWS)

    def exact(self):
        """`y`, `dx`, `dw`."""
        w = self.w[self.expert]
        dw = np.zeros(self.w.shape)
        np.add.at(dw, self.expert, self.x[:, :, None] * self.dy[:, None, :])
        return np.einsum("re,rem->rm", self.x, w), np.einsum("rm,rem->re", self.dy, w), dw


def worked(experts, recipe, placement, down):
    """`y`, `dx` and `dw` of one of the two kinds of product on a layout; of `down` those of the transposed matrices."""
    shape = placement.mesh.shape
    split = [shape.get(axis, 1) for axis in ("data", "expert", "tensor")]
    mesh = ExpertMesh.of(axes.Scope(placement), EXPERTS)
    local = EXPERTS // split[1]
    of_device = [
        np.flatnonzero((experts.expert // local == e) & (experts.device * (split[0] > 1) == d))
        for d in range(split[0])
        for e in range(split[1])
    ]
    room = max(map(len, of_device)) + 5
    rows = np.full((len(of_device), room), -1)
    for number, own in enumerate(of_device):
        rows[number, : len(own)] = own
    sizes = np.concatenate([np.bincount(experts.expert[own] % local, minlength=local) for own in of_device])
    flat = rows.reshape(-1)

    def laid(values):
        return np.where(flat[:, None] >= 0, values[flat], np.nan).astype(np.float32)

    left, right = laid(experts.x), laid(experts.dy)
    wide = np.broadcast_to(right if down else left, (split[2], *(right if down else left).shape))
    x, dy = (laid(experts.dy), np.broadcast_to(left, (split[2], *left.shape))) if down else (wide, right)
    w = np.swapaxes(experts.w, 1, 2) if down else experts.w
    with jax.set_mesh(placement.mesh), axes.activate(mesh.scope):

        def put(value, spec):
            return jax.device_put(jnp.asarray(value), jax.NamedSharding(placement.mesh, spec))

        names = "experts mlp.expert embed.expert" if down else "experts embed.expert mlp.expert"
        w = put(w.astype(np.float32), placement.spec(names.split(), "params"))
        x, dy = (
            put(one, spec)
            for one, spec in ((x, mesh.inner if down else mesh.wide), (dy, mesh.wide if down else mesh.inner))
        )

        @jax.jit
        def both(x, w, dy, sizes):
            products = Products(mesh, sizes)

            def run(x, w):
                matrix = Matrix(w, recipe=recipe)
                return products.down(x, matrix, jnp.ones(x.shape[-2])) if down else products.up(x, matrix)

            y, backward = jax.vjp(run, x, w)
            return y, *backward(dy)

        y, dx, dw = jax.device_get(both(x, w, dy, put(sizes.astype(np.int32), mesh.rows)))
    y, dx = (one.sum(axis=0) if one.ndim == 3 else one for one in (y.astype(np.float64), dx.astype(np.float64)))
    back = np.argsort(flat, kind="stable")[(flat < 0).sum() :]
    return y[back], dx[back], dw.astype(np.float64)


def errors(actual, expected):
    return [np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(actual, expected, strict=True)]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
@pytest.mark.parametrize("name", RECIPES)
def test_experts_products_are_those_of_float64_within_the_formats_rounding_on_every_layout(name, down, rng, placed):
    """What several rows share a scale of is rounded by blocks of a device's rows, so that its bits are its layout's."""
    experts = Experts(rng)
    y, dx, dw = experts.exact()
    if down:  # x and dy have changed places
        w = np.swapaxes(experts.w, 1, 2)[experts.expert]
        y, dx, dw = np.einsum("rm,rme->re", experts.dy, w), np.einsum("re,rme->rm", experts.x, w), np.swapaxes(dw, 1, 2)
    one, many = (worked(experts, RECIPES[name], placed(mesh), down) for mesh in (ONE, MANY))
    for actual in (one, many):
        assert all(0 < error < BOUNDS[name] for error in errors(actual, (y, dx, dw)))
    shared = slice(2 if name in ("block", "mx") else None)
    assert max(errors(many[shared], one[shared])) < 1e-5


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("name", ["int8", "tensor", "row"])
def test_experts_products_of_8_bits_are_the_emulated_ones(name, rng, placed):
    experts = Experts(rng)
    emulated, eight = (worked(experts, replace(RECIPES[name], emulate=e), placed(ONE), False) for e in (True, False))
    assert max(errors(eight, emulated)) < 1e-5


def test_experts_products_in_blocks_are_refused_unless_emulated(rng, placed):
    with pytest.raises(UserError, match=r"FP8Block.*FP8Block\.paths.*FP8Block\.emulate"):
        worked(Experts(rng), FP8Block(), placed(ONE), False)
