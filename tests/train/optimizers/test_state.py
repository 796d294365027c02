"""The state of each optimizer in axes, and its size."""

import jax
import jax.numpy as jnp
import optax
import pytest

from axon.layout import Layout, Placement
from axon.train.optimizers import EMA, SGD, Adafactor, AdamW, Constant, Lion, Muon, Optax, state_specs

RATE = Constant(0.01)


def under(specs, path):
    """Axes and shapes of the leaves under a parameter's path."""
    leaves = jax.tree_util.tree_leaves_with_path(specs)
    return [(s.axes, s.shape) for at, s in leaves if any(getattr(key, "key", None) == path for key in at)]


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [(AdamW(RATE), 2), (Lion(RATE), 1), (SGD(RATE), 1), (EMA(AdamW(RATE)), 3), (Optax(optax.adam, RATE), 2)],
    ids=lambda case: type(case).__name__,
)
def test_moments_and_averages_have_the_axes_of_their_parameter(optimizer, copies, parameters):
    specs = state_specs(optimizer, parameters)
    for path, spec in parameters.items():
        assert under(specs, path) == [(spec.axes, spec.shape)] * copies
    assert {spec.kind for spec in jax.tree.leaves(specs)} == {"optimizer"}


def test_factored_moments_have_the_axes_of_one_side_and_of_each_layer(parameters):
    specs = state_specs(Adafactor(RATE), parameters)
    assert under(specs, "layers/query") == [
        (("layers", "embed", "_2", "_3"), (3, 8, 1, 1)),
        (("layers", "_1", "heads", "head_dim"), (3, 1, 2, 6)),
    ]
    assert under(specs, "layers/expert") == [
        (("layers", "experts", "embed", "_3"), (3, 4, 8, 1)),
        (("layers", "experts", "_2", "mlp"), (3, 4, 1, 20)),
    ]
    assert under(specs, "layers/scale") == [(("layers", "embed"), (3, 8))]


def test_state_without_a_parameters_shape_is_whole_everywhere(parameters):
    flat = Optax(lambda rate: optax.flatten(optax.adam(rate)), RATE)
    assert all(axis.startswith("_") for spec in jax.tree.leaves(state_specs(flat, parameters)) for axis in spec.axes)


def test_bytes_are_those_of_the_formula_and_are_split_as_the_layout_says(parameters):
    """4 bytes each: Adafactor keeps inputs + outputs of a matrix, Muon one momentum of it; both two counts at most."""
    whole = {path: spec.size for path, spec in parameters.items()}
    tables = whole["embedding/table"] + whole["head"]
    vectors = whole["layers/query_bias"] + whole["layers/scale"]
    sides = (10 + 8) * 2 + 3 * ((8 + 12) * 2 + (8 + 20) * 2 + 4 * (8 + 20))
    muon = sum(whole.values()) + tables + vectors
    rest = AdamW(RATE)
    placement = Placement.described(Layout({"data": 2, "tensor": 2}, zero=1, rows={"experts": None}), 4)
    for optimizer, numbers in ((Adafactor(RATE), sides + vectors), (Muon(RATE, rest), muon)):
        specs = jax.tree.leaves(state_specs(optimizer, parameters))
        counts = [spec for spec in specs if spec.shape == ()]
        assert sum(spec.nbytes for spec in specs) == 4 * (numbers + len(counts))
        assert len(counts) <= 3
    momentum = state_specs(Muon(RATE, rest), parameters)["matrices"]["direction"][0].trace["layers/up"]
    assert placement.bytes_per_device(momentum) == momentum.nbytes // 4
    assert momentum.dtype == jnp.float32
