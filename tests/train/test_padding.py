"""Identity layers of a pipeline's stages in a program: what begins, what is updated, what is counted."""

import jax
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout, LayoutError
from axon.runtime import IDENTITY_LAYERS, Runtime, flattened, nested
from axon.train.optimizers import SGD, AdamW, Constant, Muon
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=3, heads=4, kv_heads=2, mlp=48)
STAGES = Layout({"pipe": 4, "data": 2}, microbatches=2, zero=1, pad_layers=True)
RATE = Constant(1e-2)


def program(layout, optimizer=SGD(RATE, momentum=0.0)):
    count = int(np.prod(list(layout.mesh.values())))
    return Program(MODEL, layout, optimizer, batch=8, seq=16, devices=jax.devices()[:count])


@pytest.fixture(scope="module")
def padded():
    """Three layers on four stages."""
    return program(STAGES)


@pytest.fixture
def drawn(rng):
    """drawn(): Gaussian values for every parameter, by path."""
    specs = Runtime(MODEL, Layout({"data": 1}), devices=jax.devices()[:1]).parameters
    return lambda: {path: rng.normal(size=spec.shape).astype(np.float32) for path, spec in specs.items()}


def real(path, value):
    """The layers of the model, of a stack that has one more, which is 0."""
    value = np.asarray(value)
    if not path.startswith("layers/"):
        return value
    assert not np.any(value[3:]), path
    return value[:3]


def test_layers_that_do_not_divide_are_refused_unless_they_may_be_padded():
    with pytest.raises(LayoutError, match="3 of a kind of layers do not divide into 4 stages") as caught:
        program(Layout({"pipe": 4, "data": 2}, microbatches=2))
    assert str(caught.value).startswith("parameter layers/block/attention/key:")


def test_padding_is_a_permission(padded):
    one = program(Layout({"data": 1}, pad_layers=True))
    assert IDENTITY_LAYERS not in one.choices
    assert one.parameters == program(Layout({"data": 1})).parameters
    found = padded.choices[IDENTITY_LAYERS]
    assert found == "3 layers of a kind are stored as 4, with 1 of zeros at the end"


def test_parameters_are_counted_without_padding_and_bytes_with_it(padded):
    for path, spec in program(Layout({"data": 1})).parameters.items():
        assert padded.parameters[path].size == spec.size
        assert padded.parameters[path].nbytes * 3 == spec.nbytes * (4 if path.startswith("layers/") else 3)


def test_given_parameters_are_those_of_the_model(padded, drawn):
    values = drawn()
    state = padded.init(nested(values))
    for path, value in flattened(state.parameters).items():
        np.testing.assert_array_equal(real(path, value), values[path])
    for array, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(padded.abstract_state()), strict=True):
        assert (array.shape, array.sharding) == (abstract.shape, abstract.sharding)
    stored = jax.device_get(state.parameters)
    with pytest.raises(UserError, match=r"layers/block/mlp/up: shape \(4, 32, 48\), the model's is \(3, 32, 48\)"):
        padded.init(stored)
    again = padded.begin(stored).parameters
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), stored)


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_update_on_stages_is_that_of_the_layers_alone(given, drawn):
    optimizer = Muon(RATE, AdamW(RATE))
    values, gradients = drawn(), [drawn() for _ in range(2)]
    found, norms = updated(program(STAGES, optimizer), given, values, gradients)
    expected, expected_norms = updated(program(Layout({"data": 1}), optimizer), given, values, gradients)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    for path, value in found.items():
        np.testing.assert_allclose(real(path, value), expected[path], rtol=1e-4, atol=1e-5, err_msg=path)


def updated(program, given, values, gradients):
    """The parameters after an update with each of the gradients, and these gradients' norms."""
    state, norms = program.init(nested(values)), []
    with program.runtime.tracing():
        step = program.runtime.jit(lambda state, batch: program.update.step(given(program.runtime), state, batch)[:2])
        for gradient in gradients:
            state, metrics = step(state, stored(program, gradient))
            norms.append(float(metrics["grad_norm"]))
    return flattened(jax.device_get(state.parameters)), norms


def stored(program, gradient):
    """Gradients as the program stores them, identity layers' 0."""
    missing = {p: spec.shape[0] - len(gradient[p]) for p, spec in program.parameters.items()}
    return {p: np.pad(g, [(0, missing[p])] + [(0, 0)] * (g.ndim - 1)) for p, g in gradient.items()}
