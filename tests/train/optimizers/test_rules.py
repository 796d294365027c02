"""What holds for every optimizer: layers stacked or not, dtypes, frozen groups."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_optimizer import EVERY, RATE

from axon.errors import UserError
from axon.train.optimizers import EMA, SGD, SOAP, Adafactor, AdamW, Group, Lion, Muon, ScheduleFreeAdamW, frozen_paths

FROZEN = (Group("layers/up", frozen=True), Group("head", rate=0.5, weight_decay=0.3))
GROUPED = [
    AdamW(RATE, groups=FROZEN),
    Lion(RATE, groups=FROZEN),
    SGD(RATE, groups=FROZEN),
    Adafactor(RATE, groups=FROZEN),
    Muon(RATE, AdamW(RATE, groups=FROZEN[1:]), groups=FROZEN[:1]),
    EMA(AdamW(RATE, groups=FROZEN)),
    ScheduleFreeAdamW(RATE, groups=FROZEN),
    SOAP(RATE, groups=FROZEN),
]


def named(optimizer):
    return type(optimizer).__name__


def drawn(draw, steps=3):
    return draw(), [draw() for _ in range(steps)]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("optimizer", EVERY.values(), ids=EVERY)
def test_stacked_layers_learn_as_they_would_one_by_one(optimizer, parameters, draw, moved, unstacked):
    values, gradients = drawn(draw)
    stacked = moved(optimizer, parameters, values, gradients)
    apart = moved(optimizer, unstacked(parameters), unstacked(values), [unstacked(g) for g in gradients])
    for path, value in unstacked(stacked.values).items():
        np.testing.assert_allclose(value, apart.values[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.few(optimizer=[EVERY["Muon"]])
@pytest.mark.parametrize("optimizer", EVERY.values(), ids=EVERY)
def test_parameters_in_bfloat16_are_moved_in_float32_and_rounded_once(optimizer, parameters, draw, moved):
    narrow = {path: replace(spec, dtype=jnp.bfloat16) for path, spec in parameters.items()}
    values, gradient = ({path: rounded(v) for path, v in draw().items()} for _ in range(2))
    wide, made = (moved(optimizer, specs, values, [gradient]) for specs in (parameters, narrow))
    for path, value in made.values.items():
        assert value.dtype == jnp.bfloat16
        error, exact = np.abs(np.float32(value) - wide.values[path]), wide.values[path]
        assert (error <= 2**-7 * np.abs(exact)).all(), path  # up or down: see `axon.precision.stochastic`
    assert {leaf.dtype for leaf in jax.tree.leaves(made.state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}


def rounded(values):
    return values.astype(jnp.bfloat16).astype(np.float32)


NARROW = [(AdamW, 2), (Lion, 1), (SGD, 1), (SOAP, 2), (ScheduleFreeAdamW, 1)]


@pytest.mark.few(optimizer=(AdamW,))
@pytest.mark.parametrize(("optimizer", "moments"), NARROW, ids=lambda case: getattr(case, "__name__", ""))
def test_all_moments_have_the_format_that_was_asked_for(optimizer, moments, parameters, draw, moved):
    values, gradients = drawn(draw)
    state = moved(optimizer(RATE, moments="bfloat16"), parameters, values, gradients).state
    narrow = [leaf.size for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16]
    assert sum(narrow) == moments * sum(spec.size for spec in parameters.values())


@pytest.mark.few(optimizer=GROUPED[3:4])
@pytest.mark.parametrize("optimizer", GROUPED, ids=named)
def test_frozen_parameters_have_neither_state_nor_update(optimizer, parameters, draw, moved):
    values, gradients = drawn(draw)
    values["layers/up"][0, 0, 0] = -0.0  # adding zero would turn its sign
    made = moved(optimizer, parameters, values, gradients)
    assert made.values["layers/up"].tobytes() == values["layers/up"].tobytes()
    assert not np.array_equal(made.values["layers/down"], values["layers/down"])
    assert frozen_paths(optimizer, parameters) == {"layers/up"}
    held = {
        key.key for path, _ in jax.tree_util.tree_leaves_with_path(made.state) for key in path if hasattr(key, "key")
    }
    assert held & set(parameters) == set(parameters) - {"layers/up"}


@pytest.mark.few(optimizer=[AdamW(RATE)])
@pytest.mark.parametrize("optimizer", [AdamW(RATE), Lion(RATE), SGD(RATE), Adafactor(RATE)], ids=named)
def test_a_groups_rate_and_decay_are_its_own_and_the_first_match_holds(optimizer, parameters, draw, moved):
    groups = (Group("layers/*_bias", rate=3.0, weight_decay=0.7), Group("layers/*", weight_decay=0.0), Group("head"))
    values, gradient = draw(), draw()
    plain = moved(replace(optimizer, weight_decay=0.0), parameters, values, [gradient]).values
    made = moved(replace(optimizer, weight_decay=0.2, groups=groups), parameters, values, [gradient]).values
    for path, value in values.items():
        rate, decay = {"layers/query_bias": (3.0, 0.7)}.get(path, (1.0, 0.0 if path.startswith("layers/") else 0.2))
        step = plain[path] - value
        expected = value + rate * (step - RATE.peak * decay * value)
        np.testing.assert_allclose(made[path], expected, rtol=1e-5, atol=1e-6, err_msg=path)


def test_a_pattern_that_matches_nothing_is_refused(parameters):
    optimizer = AdamW(RATE, groups=(Group("layer/*"),))
    with pytest.raises(UserError, match=r"Group.paths = 'layer/\*' matches none of the parameters.*Did you mean"):
        optimizer.transform(parameters)
