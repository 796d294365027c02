"""Identity layers are 0 and stay 0, whatever the optimizer, and the others do not see them."""

import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from every_optimizer import EVERY, RATE

from axon.train.optimizers import AdamW, Averaging, Group, Optax, state_specs

OPTIMIZERS = EVERY | {
    "AdamW": AdamW(RATE, weight_decay=0.3, groups=(Group("layers/up", frozen=True),)),
    "Optax": Optax(optax.adabelief, RATE),
}
REAL, STORED = 3, 5


@pytest.fixture
def padded(parameters):
    """The specifications with identity layers."""
    return {path: with_padding(spec) if spec.stack else spec for path, spec in parameters.items()}


def with_padding(spec):
    return replace(spec, shape=(STORED, *spec.shape[1:]), unpadded=spec.shape)


def pad(values):
    return {path: pad_stack(value) if path.startswith("layers/") else value for path, value in values.items()}


def pad_stack(value):
    return np.pad(value, [(0, STORED - REAL)] + [(0, 0)] * (value.ndim - 1))


@pytest.mark.few(name=("Muon",))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_identity_layers_stay_zero_and_change_nothing(name, parameters, padded, draw, moved):
    optimizer, values, gradients = OPTIMIZERS[name], draw(), [draw() for _ in range(3)]
    expected = moved(optimizer, parameters, values, gradients)
    found = moved(optimizer, padded, pad(values), [pad(g) for g in gradients])
    pairs = [(found.values, expected.values)]
    if isinstance(optimizer, Averaging):
        pairs.append(tuple(jax.jit(optimizer.evaluated)(m.state, m.values) for m in (found, expected)))
    for ours, theirs in pairs:
        for path, value in ours.items():
            assert not path.startswith("layers/") or not np.any(value[REAL:]), path
            real = value[:REAL] if path.startswith("layers/") else value
            np.testing.assert_allclose(real, theirs[path], rtol=1e-5, atol=1e-6, err_msg=path)
    sizes = [np.asarray(one)[tuple(map(slice, two.shape))] for one, two in leaves(found.state, expected.state)]
    for one, (_, two) in zip(sizes, leaves(found.state, expected.state), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-6)


@pytest.mark.few(name=("Adafactor",))
@pytest.mark.parametrize("name", ["Adafactor", "SOAP"])
def test_identity_layers_restored_as_zeros_stay_zero(name, padded, draw, moved):
    """Their state was not all 0: Adafactor's has eps, SOAP's a basis."""
    optimizer, gradient = OPTIMIZERS[name], pad(draw())
    before = moved(optimizer, padded, pad(draw()), [gradient])
    specs = state_specs(optimizer, padded)
    state = jax.tree.map(lambda x, spec: x if spec.unpadded is None else pad_stack(x[:REAL]), before.state, specs)
    after = moved(optimizer, padded, before.values, [gradient], state)
    for path, value in after.values.items():
        assert np.all(np.isfinite(value))
        assert not path.startswith("layers/") or not np.any(value[REAL:])


def leaves(one, other):
    return list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_padded_parameters_is_that_of_the_others_padded(name, parameters, padded):
    ours, theirs = state_specs(OPTIMIZERS[name], padded), state_specs(OPTIMIZERS[name], parameters)
    for (path, spec), other in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert (spec.axes, spec.logical_shape) == (other.axes, other.shape), path
        assert spec.shape[:1] == ((STORED,) if spec.axes[:1] == ("layers",) else other.shape[:1])
        assert spec.nbytes == math.prod(spec.shape) * spec.dtype.itemsize >= other.nbytes


def test_state_in_an_order_of_its_own_is_not_taken_for_padded(padded):
    flat = Optax(lambda rate: optax.flatten(optax.adam(rate)), RATE)
    assert all(spec.unpadded is None for spec in jax.tree.leaves(state_specs(flat, padded)))
