"""Work on whole matrices where a layout splits them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.layout import Layout
from axon.train.optimizers.matrix import as_matrix, axes_of_part
from axon.train.optimizers.sharing import map_matrices

LAYOUTS = [
    Layout({"data": 2}, zero=1),
    Layout({"tensor": 2}),
    Layout({"data": 2, "tensor": 2}, zero=1, auto=True),
    Layout({"data": 2, "expert": 2, "tensor": 2}, zero=3),
    Layout({"data": 4, "tensor": 2}, optimizer={"head_dim": "tensor", "heads": None, "embed": "data", "mlp": None}),
    Layout({"x": 2, "y": 2}, rows={"embed": ("x", "y"), "heads": None}, order=("x", "y")),
]


@pytest.mark.few(separate=(("heads",),), layout=LAYOUTS[2:])
@pytest.mark.parametrize("separate", [(), ("heads",)], ids=["whole", "by head"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout.mesh))
def test_every_matrix_is_whole_where_it_is_worked_with(layout, separate, parameters, draw, placed, compiled):
    placement = placed(layout.mesh, **{name: getattr(layout, name) for name in FIELDS})
    matrices = {path: m for path, spec in parameters.items() if (m := as_matrix(spec, separate))}
    values = {path: draw()[path] for path in matrices}
    specs = {path: placement.sharding(matrices[path].axes, "optimizer") for path in matrices}
    centre = lambda v: map_matrices(centred, matrices, v)  # noqa: E731
    made = compiled(placement, centre, jax.tree.map(jax.device_put, values, specs))
    for path, one in jax.jit(centre)(values).items():
        assert made[path].sharding.is_equivalent_to(specs[path], one.ndim), path
        np.testing.assert_allclose(made[path], one, rtol=1e-5, atol=1e-5 * np.max(np.abs(one)), err_msg=path)


FIELDS = ("rows", "params", "grads", "optimizer", "zero", "auto", "order")


def centred(x):
    """Something that needs whole matrices, and does not care for the order of rows and columns."""
    assert x.shape[1] <= x.shape[2]
    return x * jnp.sum(x, axis=(1, 2), keepdims=True) - jnp.mean(x, axis=2, keepdims=True)


def test_devices_that_split_a_matrix_share_the_work(parameters, placed, compiled):
    """4 devices, 2 × 2 parts: of the 2 × 3 matrices of up and down (one padded up to 8) each device works with 2."""
    seen = []
    placement = placed({"data": 2, "tensor": 2}, zero=1)
    matrices = {path: as_matrix(parameters[path]) for path in ("layers/up", "layers/down")}

    def counted(x):
        seen.append(x.shape)
        return x

    values = {
        path: jax.device_put(np.zeros(parameters[path].shape), placement.sharding(parameters[path].axes, "optimizer"))
        for path in matrices
    }
    compiled(placement, lambda v: map_matrices(counted, matrices, v), values)
    assert seen == [(2, 8, 20)]


def test_sides_travel_with_their_matrices(parameters, rng, placed, compiled):
    """Arrays with 1 in the place of rows or columns, and one more dimension, meet the matrices that they belong to."""
    placement = placed({"data": 2, "tensor": 4}, zero=1, rows={"heads": None, "experts": None})
    matrices = {path: as_matrix(parameters[path]) for path in ("layers/up", "layers/down", "layers/expert")}
    values = {path: with_sides(matrix, rng) for path, matrix in matrices.items()}

    def place(path, value):
        matrix = matrices[path]
        return jax.device_put(
            value, placement.sharding(axes_of_part(matrix.axes, matrix.shape, value.shape), "optimizer")
        )

    on_mesh = {path: {name: place(path, value) for name, value in tree.items()} for path, tree in values.items()}
    mix = lambda v, factor: map_matrices(mixed, matrices, v, factor)  # noqa: E731
    made = compiled(placement, mix, on_mesh, jnp.float32(3))
    for path, tree in jax.jit(mix)(values, 3.0).items():
        for name, value in tree.items():
            np.testing.assert_allclose(made[path][name], value, rtol=1e-5, atol=1e-4, err_msg=f"{path} {name}")
            assert made[path][name].sharding.is_equivalent_to(on_mesh[path][name].sharding, value.ndim)


def with_sides(matrix, rng):
    """Values of a matrix, and a square for each of its sides."""
    shapes = {"value": matrix.shape}
    for name, side in (("rows", matrix.rows), ("columns", matrix.columns)):
        own = (n if d in (*matrix.count, *side) else 1 for d, n in enumerate(matrix.shape))
        shapes[name] = (*own, matrix.length(side))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def mixed(tree, factor):
    """Each of the three made of the other two."""
    value, rows, columns = tree["value"], tree["rows"][:, :, 0], tree["columns"][:, 0]
    new = (rows @ value, value @ value.mT * factor, value.mT @ value - columns)
    return {"value": new[0] @ columns, "rows": new[1][:, :, None], "columns": new[2][:, None]}
