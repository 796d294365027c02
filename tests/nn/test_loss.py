"""Losses over a vocabulary that may be split: the formula's values and gradients, and what they never make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.axes import shard
from axon.errors import UserError
from axon.kernels.cross_entropy import cross_entropy_reference, token_nll_reference
from axon.nn import Head, Param, cross_entropy, token_nll
from axon.plan.flops import bodies_of

SIZES = {"embed": 8, "vocab": 32}
LAYOUTS = [
    (None, {}),
    ({"tensor": 4}, {}),
    ({"data": 4}, {"zero": 3}),
    ({"replica": 2, "data": 2}, {"zero": 3}),
    ({"data": 2, "tensor": 4}, {"zero": 3}),
    ({"data": 2, "context": 2}, {"zero": 3}),
    ({"data": 2, "context": 2, "tensor": 2}, {}),
    ({"data": 4}, {"rows": {"vocab": "data"}}),
]


@pytest.fixture
def drawn(rng):
    """drawn(seq): what a loss of `4 seq` tokens is given, its head at random tied, padded and capped."""

    def make(seq=8):
        names = str(rng.choice(["embed vocab", "vocab embed"]))
        vocab, soft_cap = int(rng.choice([29, 32])), rng.choice([None, 1.5])
        print(names, vocab, soft_cap)
        return {
            "x": rng.normal(size=(4, seq, 8)).astype(np.float32),
            "head": rng.normal(size=[SIZES[n] for n in names.split()]).astype(np.float32),
            "targets": rng.integers(0, vocab, (4, seq), dtype=np.int32),
            "weights": (rng.random((4, seq)) < 0.7).astype(np.float32),
            "z_loss": float(rng.choice([0.0, 0.2])),
            "of_tokens": rng.normal(size=(2, 4, seq)).astype(np.float32),
            "names": names,
            "columns": (vocab, soft_cap),
        }

    return make


def head_of(value, drawn):
    matrix = Param(drawn["names"], SIZES)
    matrix.set_value(value)
    return Head(matrix, *drawn["columns"])


def sums(x, value, drawn):
    return cross_entropy(
        shard(x, "batch seq embed"), head_of(value, drawn), drawn["targets"], drawn["weights"], drawn["z_loss"]
    )


def tokens(x, value, drawn):
    return token_nll(shard(x, "batch seq embed"), head_of(value, drawn), drawn["targets"])


def sums_and_gradients(x, value, drawn, sums=sums):
    """And the gradients of three times the objective."""
    gradients = jax.grad(lambda x, w: 3 * sums(x, w, drawn)[0], argnums=(0, 1))
    return sums(x, value, drawn), gradients(x, value)


def tokens_and_gradients(x, value, drawn, tokens=tokens):
    """And the gradients of a random function of both results."""
    found, backward = jax.vjp(lambda x, w: tokens(x, w, drawn), x, value)
    return found, backward(tuple(jnp.asarray(v) for v in drawn["of_tokens"]))


def flat(x, value, drawn):
    return x.reshape(-1, 8), value if drawn["names"] == "embed vocab" else value.T, drawn["targets"].reshape(-1)


def reference_of_sums(x, value, drawn):
    rest = drawn["weights"].reshape(-1), drawn["z_loss"], *drawn["columns"]
    return cross_entropy_reference(*flat(x, value, drawn), *rest)


def reference_of_tokens(x, value, drawn):
    found = token_nll_reference(*flat(x, value, drawn), *drawn["columns"])
    return tuple(v.reshape(drawn["targets"].shape) for v in found)


FORMS = {
    "sums": (sums_and_gradients, reference_of_sums),
    "tokens": (tokens_and_gradients, reference_of_tokens),
}


def close(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.few(auto=(False,), seq=(8,), form=("tokens",), mesh=[LAYOUTS[i][0] for i in (1, 4, 6)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seq", [8, 4], ids=["head moves", "tokens move"])
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_a_loss_and_its_gradients_do_not_depend_on_the_layout(mesh, options, auto, seq, form, drawn, placed, compiled):
    given, (ours, reference) = drawn(seq), FORMS[form]
    placement = placed(mesh, auto=auto, **options)
    stored = jax.device_put(given["head"], placement.sharding(tuple(given["names"].split()), "params"))
    made = compiled(placement, lambda x, w: ours(x, w, given), given["x"], stored)
    close(made, jax.jit(lambda x, w: ours(x, w, given, reference))(given["x"], given["head"]))
    assert {value.dtype for value in jax.tree.leaves(made)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("form", FORMS)
def test_without_a_layout_a_loss_is_the_reference(form, drawn):
    given, (ours, reference) = drawn(), FORMS[form]
    both = jax.jit(lambda x, w: (ours(x, w, given), ours(x, w, given, reference)))
    close(*both(given["x"], given["head"]))


@pytest.mark.few(mesh=({"data": 2, "tensor": 4},))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mesh", "options"), [LAYOUTS[0], LAYOUTS[4], LAYOUTS[6]])
def test_of_a_frozen_head_no_gradient_is_made_and_that_for_x_is_the_same(mesh, options, form, drawn, placed, compiled):
    given = drawn()
    placement = placed(mesh, **options)
    stored = jax.device_put(given["head"], placement.sharding(tuple(given["names"].split()), "params"))

    def of_x(x, w):
        if form == "sums":
            return jax.grad(lambda x: sums(x, w, given)[0])(x)
        return jax.vjp(lambda x: tokens(x, w, given), x)[1](tuple(map(jnp.asarray, given["of_tokens"])))[0]

    def of_both(x, w):
        return FORMS[form][0](x, w, given)[1][0] / (3 if form == "sums" else 1)

    close(compiled(placement, of_x, given["x"], stored), compiled(placement, of_both, given["x"], stored))
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement, jnp.float32)):
        counts = [
            products(jax.make_jaxpr(lambda x, w, one=one: one(x, w))(given["x"], stored).jaxpr)
            for one in (of_x, of_both)
        ]
    assert counts[0] == 2 + (form == "tokens")
    assert counts[1] - counts[0] == (2 if form == "sums" else 1), "also the sums alone, and the head's"


def products(jaxpr):
    """How many matrix products there are, those of loops once."""
    inner = [part for equation in jaxpr.eqns for part in bodies_of(equation.params)]
    return sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns) + sum(map(products, inner))


def test_the_objective_is_a_function_of_the_tokens_losses(drawn, placed, compiled):
    given = drawn()

    def objective(x, value):
        nll, lse = tokens(x, value, given)
        return jnp.sum(given["weights"] * (nll + given["z_loss"] * lse**2))

    by_token = lambda x, w: jax.value_and_grad(objective, (0, 1))(x, w)  # noqa: E731
    fused = lambda x, w: jax.value_and_grad(lambda x, w: sums(x, w, given)[0], (0, 1))(x, w)  # noqa: E731
    placement, operands = placed({"data": 2, "tensor": 2}, zero=3), (given["x"], given["head"])
    close(compiled(placement, by_token, *operands), compiled(placement, fused, *operands))


@pytest.mark.few(wrapped=(jax.checkpoint,))
@pytest.mark.parametrize("wrapped", [lambda fn: fn, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"])
def test_a_gradient_of_the_second_sum_is_an_error_that_names_token_nll(wrapped, drawn, placed, compiled):
    given = drawn()

    def gradient(function):
        return lambda x, w: jax.grad(wrapped(lambda x: function(sums(x, w, given))))(x)

    operands = given["x"], given["head"]
    for wrong in (lambda made: made[1], lambda made: made[0] + made[1]):
        with pytest.raises(UserError, match=r"second result, nll, has no gradient.*axon\.nn\.token_nll"):
            compiled(placed({"data": 2}), gradient(wrong), *operands)
    made = compiled(placed({"data": 2}), gradient(lambda made: made[0] + jax.lax.stop_gradient(made[1])), *operands)
    close(made, compiled(placed({"data": 2}), gradient(lambda made: made[0]), *operands))


def test_a_gradient_for_the_weights_is_an_error_that_names_token_nll(drawn, placed, compiled):
    given = drawn()
    gradient = jax.grad(lambda weights: sums(given["x"], given["head"], given | {"weights": weights})[0])
    with pytest.raises(UserError, match=r"gradient is asked for its weights.*axon\.nn\.token_nll"):
        compiled(placed(), gradient, given["weights"])


def test_a_soft_cap_below_zero_is_refused(drawn):
    given = drawn() | {"columns": (None, -30.0)}
    with pytest.raises(UserError, match=r"Head\.soft_cap is -30\.0; must be above 0, or None"):
        head_of(given["head"], given)


# ---- what is never made ---------------------------------------------------------------------------------------------


def shapes(jaxpr):
    """Shape and dtype of every value in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        yield from ((v.aval.shape, v.aval.dtype) for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mesh", "share"), [(None, 1), ({"data": 2, "tensor": 2}, 4)])
def test_logits_of_all_tokens_never_exist(mesh, share, form, drawn, placed):
    given, placement = drawn(), placed(mesh)
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement, jnp.bfloat16)):
        jaxpr = jax.make_jaxpr(lambda x, w: FORMS[form][0](x, w, given))(given["x"], given["head"])
    columns = 32 // (2 if mesh else 1)
    block = 4 * 8 * 32 // share // 2
    found = [shape for shape, dtype in shapes(jaxpr.jaxpr) if shape and columns in shape and dtype == jnp.float32]
    assert (block // columns, columns) in found, "a block of half of the device's tokens"
    assert max(np.prod(shape) for shape in found) <= max(block, 8 * 32)


def test_what_a_tokens_loss_keeps_for_its_backward_is_its_input_the_stored_head_and_a_number_a_token(drawn, placed):
    given, placement = drawn() | {"names": "embed vocab"}, placed({"data": 4}, zero=3)
    stored = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=placement.sharding(("embed", "vocab"), "params"))
    kept = []

    def run(x, w):
        kept.extend(jax.tree.leaves(jax.vjp(lambda x, w: tokens(x, w, given), x, w)[1]))

    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement, jnp.bfloat16)):
        jax.eval_shape(run, given["x"], stored)
    types = {
        (value.shape, str(jax.typeof(value).sharding.spec[0]), value.dtype.name) for value in kept if value.ndim > 1
    }
    assert types <= {
        ((4, 8, 8), "data", "float32"),
        ((8, 32), "data", "float32"),
        ((4, 8), "data", "float32"),
        ((4, 8), "None", "int32"),
    }


@pytest.mark.few(form=("tokens",))
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_a_gradient_for_x_are_rounded_once_they_are_summed(form, drawn, placed):
    """In bfloat16 a split vocabulary's is the whole one's, but where that lies between two numbers."""
    given, found = drawn(), []
    operands = jnp.asarray(given["x"], jnp.bfloat16), given["head"]
    for mesh in (None, {"tensor": 4}):
        placement = placed(mesh)
        with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement, jnp.bfloat16)):
            _, (dx, _) = jax.jit(lambda x, w: FORMS[form][0](x, w, given))(*operands)
        found.append(np.asarray(dx, np.float64))
    assert dx.dtype == jnp.bfloat16
    assert np.mean(found[0] != found[1]) < 0.05
