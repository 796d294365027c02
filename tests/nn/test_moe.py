"""Experts: each token through those it chose, by whatever dispatcher, on any mesh: the plain reference's values."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon import axes
from axon.errors import UserError
from axon.layout import Layout, sequence_parallel
from axon.nn import ClampedSwiGLU, Inputs, MoE, Param, Routing, parameters, variables
from axon.nn.flops import forward_flops
from axon.parallel.expert import ExpertMesh, Local, Padded, Ragged

DIMS = {"embed": 8, "mlp": 8, "experts": 8}
BATCH, SEQ = 8, 12
LOSSES = {"sequence_loss": 0.1, "z_loss": 0.01, "global_loss": 0.2, "bias_rate": 0.1}
ROUTING = Routing(8, 2, **LOSSES)
WHOLE = {"shared": 4, "bias": True, "activation": ClampedSwiGLU(limit=1.0)}
FOLDED = {
    "rows": {"seq.expert": ("context", "tensor")},
    "params": {"experts": ("expert", "tensor"), "mlp.expert": None},
}
SHARED = {"rows": {"experts": None}, "params": {"experts": "tensor", "mlp.expert": None}}
ONE = Layout({"data": 1})
LAYOUTS = [
    ONE,
    Layout({"expert": 4}),
    Layout({"expert": 2, "tensor": 2}),
    Layout({"data": 2, "expert": 2}, zero=3),
    Layout({"data": 2, "tensor": 2}, **SHARED),
    Layout({"expert": 2, "tensor": 2}, **FOLDED),
    Layout({"expert": 2, "tensor": 2}, rows=sequence_parallel()),
    Layout({"data": 2, "context": 2}, zero=1),
    Layout({"expert": 2, "context": 2}, rows={"batch": "data", "seq": ("context", "expert")}),
    Layout({"data": 2, "expert": 2, "tensor": 2}, zero=3, auto=True),
]
LOADS = {"balanced": None, "two experts": (6, 7), "empty experts": (0, 2, 5)}


def described(layout):
    return " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items()) + f", zero {layout.zero}"


def nested(flat):
    return nnx.traversals.unflatten_mapping({tuple(path.split("/")): value for path, value in flat.items()})


def draw(rng, module, load=None):
    """Parameters, whose router's margins exceed rounding; variables whose bias leaves the experts of `load`; x."""
    values = {path: rng.normal(size=s.shape).astype(np.float32) * 0.5 for path, s in parameters(module).items()}
    values["router/matrix"] *= 2
    state = {path: np.zeros(s.shape, np.float32) for path, s in variables(module).items()}
    state["router/load"] = rng.uniform(1, 9, 8).astype(np.float32)
    if load is not None:
        state["router/bias"] = np.where(np.isin(np.arange(8), load), 10.0, 0.0).astype(np.float32)
    return values, state, rng.normal(size=(BATCH, SEQ, 8)).astype(np.float32)


class Run:
    """A module on a placement, compiled once by an `Execution` with these fields: (y, auxiliary) and gradients for
    parameters and x of a draw.

    Two tokens of each sequence are padding.
    """

    def __init__(self, placement, module, **fields):
        self.placement, graph = placement, nnx.split(module, Param, ...)[0]
        self.scope = axes.Scope(placement, execution=axes.Execution(**fields))
        documents = np.where(np.arange(SEQ) < SEQ - 2, 0, -1) * np.ones((BATCH, 1), np.int32)
        inputs = Inputs(documents, documents, documents)
        specs = parameters(module)
        self.shardings = {path: placement.sharding(spec.axes, "params") for path, spec in specs.items()}

        def loss(values, x, state):
            y, auxiliary = nnx.merge(graph, nested(values | state))(axes.shard(x, "batch seq.residual embed"), inputs)
            total = sum(auxiliary.losses.values(), jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(8.0))))
            return total, (y, auxiliary)

        self.fn = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def __call__(self, values, state, x):
        with jax.set_mesh(self.placement.mesh), axes.activate(self.scope):
            placed = {path: jax.device_put(value, self.shardings[path]) for path, value in values.items()}
            x = jax.device_put(x, self.placement.sharding(("batch", "seq", "embed")))
            (_, result), gradients = self.fn(placed, x, state)
            return jax.device_get((result, gradients))


def check_same(found, expected, tolerance=1e-5):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = max(np.linalg.norm(other), 1e-3)
        assert np.linalg.norm(one - other) <= tolerance * scale, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def reference(placed):
    return Run(placed(), MoE(DIMS, ROUTING, **WHOLE), dispatcher="dense")


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(layout=[LAYOUTS[i] for i in (0, 4, 5, 7, 9)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=described)
def test_output_losses_statistics_and_gradients_are_those_of_every_expert_on_every_token(
    layout, rng, placed, reference
):
    """Whatever the load: where all goes to two experts, in several rounds."""
    module = MoE(DIMS, ROUTING, **WHOLE)
    placement = placed(layout.mesh, **{n: getattr(layout, n) for n in ("rows", "params", "zero", "auto")})
    run = Run(placement, module, capacity_factor=1.0)
    for load in LOADS.values():
        drawn = draw(rng, module, load)
        check_same(run(*drawn), reference(*drawn))


def plain_experts(values, x, chosen, weights):
    """A token and an expert at a time."""
    y = np.zeros(x.shape)
    for token in np.ndindex(*x.shape[:2]):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (x[token] @ values[name][expert] + values[f"{name}_bias"][expert] for name in ("gate", "up"))
            gate, up = np.minimum(gate, 1), np.clip(up, -1, 1)
            h = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            y[token] += weight * (h @ values["down"][expert] + values["down_bias"][expert])
    return y


def test_the_reference_is_the_formula_and_no_layout_is_the_reference(rng, placed):
    module = MoE(DIMS, Routing(8, 3), **WHOLE | {"shared": 0})
    values, state, x = draw(rng, module)
    logits = x @ values["router/matrix"] + values["router/logit_bias"]
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[..., :3]
    weights = np.take_along_axis(scores, chosen, -1)
    expected = plain_experts(values, x, chosen, weights / weights.sum(-1, keepdims=True))
    inputs = Inputs(None, None)
    graph = nnx.split(module, Param, ...)[0]
    y, _ = jax.jit(lambda given, x: nnx.merge(graph, nested(given))(x, inputs))(values | state, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    (found, _), _ = Run(placed(), module, dispatcher="dense")(values, state, x)
    np.testing.assert_allclose(found[:, : SEQ - 2], expected[:, : SEQ - 2], rtol=1e-4, atol=1e-4)
    assert not found[:, SEQ - 2 :].any(), "padding goes to no expert"


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("mesh", [{"data": 1}, {"expert": 2, "context": 2}])
def test_what_is_dropped_for_capacity_does_not_depend_on_the_layout(mesh, rng, placed):
    routing = Routing(8, 2, capacity=0.5, **LOSSES)
    drawn = draw(rng, MoE(DIMS, routing))
    expected = Run(placed(), MoE(DIMS, routing), dispatcher="dense")(*drawn)
    found = Run(placed(mesh), MoE(DIMS, routing))(*drawn)
    check_same(found, expected)
    statistics = found[0][1].statistics
    assert statistics["router/load"].sum() == BATCH * (SEQ - 2) * 2
    dropped = statistics["router/load"].sum() - BATCH * 8 * routing.places(SEQ)
    assert statistics["router/dropped"] >= max(dropped, 1)


def traced(placement, rng, **fields):
    """What tracing a module's output logs."""
    module = MoE(DIMS, ROUTING)
    values, state, x = draw(rng, module)
    run = Run(placement, module, **fields)
    with jax.set_mesh(placement.mesh), axes.activate(run.scope):
        run.fn.trace(values, x, state)
    return run.scope.choices["experts"]


def test_the_choice_of_the_dispatcher_is_logged(rng, placed):
    assert [traced(placed(mesh), rng) for mesh in ({"data": 2}, {"expert": 2})] == [
        "each device's own tokens",
        "padded: tokens sent over expert, 1.5 × the balanced load in a round",
    ]


def test_flops_are_those_of_the_experts_that_a_token_goes_through():
    module = MoE({"embed": 8, "mlp": 10, "experts": 16}, Routing(16, 3), shared=20)
    assert forward_flops(module, 5) == 2 * 8 * 16 + 3 * 3 * 2 * 8 * 10 + 3 * 2 * 8 * 20


def test_a_ragged_dispatcher_on_a_cpu_is_refused(rng, placed):
    with pytest.raises(UserError, match="'ragged' is unavailable on CPUs, use 'padded'"):
        traced(placed({"expert": 2}), rng, dispatcher="ragged")


def test_a_layout_of_many_devices_has_no_buffer_larger_than_its_capacity(placed):
    """A device's rows are those of its own tokens, times the capacity factor, whatever the number of devices."""
    for size in (1, 2, 4, 8):
        placement = placed({"expert": size})
        with jax.set_mesh(placement.mesh):
            mesh = ExpertMesh.of(axes.Scope(placement), 16)
            copies = 4096
            for dispatcher in (kind(mesh, copies, 1.25) for kind in ((Padded, Ragged) if size > 1 else (Local,))):
                assert dispatcher.num_rows <= math.ceil(1.25 * copies) + size
                assert dispatcher.num_rows * dispatcher.most_rounds >= copies * (
                    size if isinstance(dispatcher, Ragged) else 1
                )
