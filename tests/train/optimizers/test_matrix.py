"""Parameters as matrices, and work on them where a layout splits them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.layout import Layout
from axon.train.optimizers.matrix import as_matrix, map_matrices, within


def test_inputs_and_outputs_are_those_of_the_contraction(parameters):
    sides = {path: as_matrix(spec) for path, spec in parameters.items()}
    assert (sides["layers/out"].count, sides["layers/out"].inputs, sides["layers/out"].outputs) == ((0,), (1, 2), (3,))
    assert (sides["layers/query"].inputs, sides["layers/query"].outputs) == ((1,), (2, 3))
    assert (sides["layers/expert"].count, sides["layers/expert"].inputs) == ((0, 1), (2,))
    assert sides["layers/scale"] is sides["layers/query_bias"] is None


def test_heads_count_matrices_where_they_are_outputs(parameters):
    assert as_matrix(parameters["layers/query"], ("heads",)).count == (0, 2)
    assert as_matrix(parameters["layers/out"], ("heads",)) == as_matrix(parameters["layers/out"])
    assert as_matrix(parameters["layers/query"], ("heads", "head_dim")) is None


def test_one_layers_and_one_experts_part_has_the_other_dimensions(parameters):
    assert within(parameters["layers/expert"]) == (2, 3)
    assert within(parameters["layers/scale"]) == (1,)


LAYOUTS = [
    Layout({"data": 2}, zero=1),
    Layout({"tensor": 2}),
    Layout({"data": 2, "tensor": 2}, zero=1, auto=True),
    Layout({"data": 2, "expert": 2, "tensor": 2}, zero=3),
    Layout({"data": 4, "tensor": 2}, optimizer={"head_dim": "tensor", "heads": None, "embed": "data", "mlp": None}),
    Layout({"x": 2, "y": 2}, rows={"embed": ("x", "y"), "heads": None}, order=("x", "y")),
]


@pytest.mark.parametrize("separate", [(), ("heads",)], ids=["whole", "by head"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(layout.mesh))
def test_every_matrix_is_whole_where_it_is_worked_with(layout, separate, parameters, draw, placed, compiled):
    placement = placed(layout.mesh, **{name: getattr(layout, name) for name in FIELDS})
    matrices = {path: m for path, spec in parameters.items() if (m := as_matrix(spec, separate))}
    values = {path: draw()[path] for path in matrices}
    specs = {path: placement.sharding(matrices[path].axes, "optimizer") for path in matrices}
    made = compiled(
        placement, lambda v: map_matrices(centred, matrices, v), jax.tree.map(jax.device_put, values, specs)
    )
    for path, one in map_matrices(centred, matrices, values).items():
        assert made[path].sharding.is_equivalent_to(specs[path], one.ndim), path
        np.testing.assert_allclose(made[path], one, rtol=1e-5, atol=1e-5, err_msg=path)


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
