"""The loss over a vocabulary that may be split, and what it never makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import shard
from axon.kernels.cross_entropy import cross_entropy_reference
from axon.nn import Param, cross_entropy
from axon.nn.head import Head

SIZES = {"embed": 8, "vocab": 32}
LAYOUTS = [
    (None, {}),
    ({"tensor": 4}, {}),
    ({"data": 4}, {"zero": 3}),
    ({"data": 2, "tensor": 4}, {"zero": 3}),
    ({"data": 2, "context": 2}, {"zero": 3}),
    ({"data": 2, "context": 2, "tensor": 2}, {}),
    ({"data": 4}, {"rows": {"vocab": "data"}}),
]


@pytest.fixture
def run(rng, bind):
    """run(axes, z_loss): a function of (x, head) for `compiled`, with gradients of three times the objective."""
    ids = int(rng.choice([29, 32]))  # of 32 columns: some may be padding

    def make(names, z_loss, seq=8):
        targets = rng.integers(0, ids, (4, seq), dtype=np.int32)
        weights = (rng.random((4, seq)) < 0.7).astype(np.float32)

        def loss(x, head):
            param = Param(names, SIZES)
            param.set_value(head)
            return cross_entropy(shard(x, "batch seq embed"), Head(param, ids), targets, weights, z_loss)

        def both(x, head):
            return loss(x, head), jax.grad(lambda x, h: 3 * loss(x, h)[0], argnums=(0, 1))(x, head)

        def reference(x, head):
            head = head if names == "embed vocab" else head.T
            return cross_entropy_reference(
                x.reshape(-1, 8), head, targets.reshape(-1), weights.reshape(-1), z_loss, ids
            )

        def both_of_reference(x, head):
            return reference(x, head), jax.grad(lambda x, h: 3 * reference(x, h)[0], argnums=(0, 1))(x, head)

        return both, both_of_reference

    return make


def close(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("names", ["embed vocab", "vocab embed"])
@pytest.mark.parametrize("seq", [8, 4], ids=["head moves", "tokens move"])
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_the_loss_and_its_gradients_do_not_depend_on_the_layout(
    mesh, options, auto, seq, names, run, rng, placed, compiled
):
    x = rng.normal(size=(4, seq, 8)).astype(np.float32)
    head = rng.normal(size=[SIZES[n] for n in names.split()]).astype(np.float32)
    z_loss = float(rng.choice([0.0, 0.2]))
    placement = placed(mesh, auto=auto, **options)
    ours, reference = run(names, z_loss, seq)
    stored = jax.device_put(head, placement.sharding(tuple(names.split()), "params"))
    close(compiled(placement, ours, x, stored), reference(x, head))


def test_without_a_layout_it_is_the_reference(run, rng):
    x, head = rng.normal(size=(4, 8, 8)).astype(np.float32), rng.normal(size=(8, 32)).astype(np.float32)
    ours, reference = run("embed vocab", 0.2)
    close(ours(x, head), reference(x, head))


def shapes(jaxpr):
    """Shape and dtype of every value in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        yield from ((v.aval.shape, v.aval.dtype) for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def test_logits_of_all_tokens_never_exist(run, placed):
    from axon import axes

    placement, (both, _) = placed(), run("embed vocab", 0.0)
    with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement, jnp.bfloat16)):
        jaxpr = jax.make_jaxpr(lambda x, h: both(x, h))(jnp.ones((4, 8, 8)), jnp.ones((8, 32)))
    found = [(shape, dtype) for shape, dtype in shapes(jaxpr.jaxpr) if shape and 32 in shape]
    assert ((16, 32), jnp.float32) in found, "a block of half the tokens"
    assert max(np.prod(shape) for shape, _ in found) < 4 * 8 * 32
