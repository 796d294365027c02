"""Objectives: means over the global batch, whatever the parts; and variables that a step updates."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import einsum
from axon.errors import UserError
from axon.layout import Execution, Layout, sequence_parallel
from axon.nn import Auxiliary, Depth, LanguageModel, RMSNorm, Segment, Variable, token_nll
from axon.train.gradients import total_counts
from axon.train.objective import BySequence, MultiToken, NextToken, Objective, Sums
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.deepseek import DeepSeek
from models.llama import Block, Llama

MODEL = Llama(vocab=48, embed=16, layers=1, heads=2, kv_heads=2, mlp=24)
SEQUENCES, SEQ = 8, 12
TWO_TOKENS = DeepSeek(
    vocab=48,
    embed=16,
    layers=1,
    first_dense=1,
    heads=2,
    mlp=24,
    q_latent=8,
    kv_latent=6,
    nope_dim=4,
    rope_dim=4,
    value_dim=6,
    multi_token=True,
)


class Penalised(Block):
    """A Llama block with a loss of its own, and a variable that counts how much it has seen of each channel."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = Variable("embed", config.dims, lambda seen, now: seen + now)

    def __call__(self, x, inputs, cache=None):
        x, cache, _ = super().__call__(x, inputs, cache)
        ones = jnp.ones(x.shape[1:2])
        seen = einsum("batch seq embed, seq -> batch embed", jnp.square(x), ones).sum(0)
        return x, cache, Auxiliary({"activity": 0.01 * jnp.sum(jnp.square(x))}, {"seen": jax.lax.stop_gradient(seen)})


@dataclass(frozen=True)
class PenalisedLlama:
    vocab: int = MODEL.vocab

    def build(self):
        depth = Depth(Segment(MODEL.layers, block=Penalised(MODEL)))
        norm = RMSNorm("embed", MODEL.dims)
        return LanguageModel(MODEL.dims, depth, norm, tied=False, embedding_stddev=1.0)


@dataclass(frozen=True)
class Preference(Objective):
    """An objective with a cotangent of its own for every token, and a second term with another count."""

    def counts(self, batch):
        return {"tokens": jnp.sum(batch["weights"]), "sequences": jnp.sum(jnp.max(batch["weights"], axis=1))}

    def sums(self, module, batch, key=None):
        x, *_ = module.hidden(NextToken().inputs(batch))
        nll, lse = token_nll(x, module.output, batch["targets"])
        whole = jnp.sum(nll * batch["weights"], axis=1)
        tokens = jnp.sum(jnp.square(nll) * batch["weights"])
        return Sums({"tokens": tokens, "sequences": jnp.sum(jnp.tanh(whole / 10))}, {"loss": jnp.sum(lse)})


@pytest.fixture
def first_step(begun, seed):
    """first_step(batch, layout, …): gradients, metrics and variables, always from the same parameters."""

    def step(batch, layout, model=MODEL, objective=NextToken()):
        made = program(layout, model, objective)
        state, metrics = made.step(begun(made, np.random.default_rng(seed)), made.place(batch))
        moments = {path: np.asarray(m) for path, m in state.optimizer["direction"].mu.items()}
        return moments, jax.device_get(metrics), jax.device_get(state.variables)

    return step


def program(layout, model, objective):
    devices = jax.devices()[: int(np.prod(list(layout.mesh.values())))]
    optimizer = AdamW(Constant(0.0), clip=None)
    execution = Execution(remat="full" if model is TWO_TOKENS else "none")
    options = {"objective": objective, "execution": execution, "devices": devices}
    return Program(model, layout, optimizer, batch=SEQUENCES, seq=SEQ, **options)


def assert_same(ours, theirs):
    for path, gradient in theirs.items():
        np.testing.assert_allclose(ours[path], gradient, atol=2e-5 * np.abs(gradient).max() + 1e-9, err_msg=path)


LAYOUTS = [
    Layout({"data": 1}, microbatches=2),
    Layout({"data": 1}, microbatches=8),
    Layout({"data": 2, "tensor": 2}, zero=3, microbatches=2),
    Layout({"context": 2, "tensor": 2}, rows=sequence_parallel(), context="ring"),
]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(layout=LAYOUTS[2:3])
@pytest.mark.some(objective=(Preference(),))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("model", "objective"),
    [(PenalisedLlama(), NextToken(0.01)), (MODEL, Preference()), (TWO_TOKENS, MultiToken(z_loss=0.01))],
)
def test_terms_are_means_over_the_global_batch(layout, model, objective, first_step, rng, packed_batch):
    batch = packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)
    one, metrics, variables = first_step(batch, Layout({"data": 1}), model, objective)
    ours, other, others = first_step(batch, layout, model, objective)
    assert_same(ours, one)
    for name in metrics:
        np.testing.assert_allclose(other[name], metrics[name], rtol=2e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), others, variables)


def test_a_batch_without_the_numbers_of_its_sequences_is_refused_with_what_to_add():
    batch = {name: jnp.zeros((2, 4), jnp.int32) for name in ("tokens", "targets", "positions", "documents", "weights")}
    with pytest.raises(UserError, match=r"the batch needs 'sequences': .*jnp\.arange\(len\(batch\['weights'\]\)\)"):
        NextToken().inputs(batch, jax.random.key(0))
    batch |= {"sequences": jnp.arange(2)}
    assert NextToken().inputs(batch, jax.random.key(0)).sequences is batch["sequences"]


def test_counts_of_microbatches_are_added_up_without_a_loop(rng, packed_batch):
    batch = packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)
    count = partial(total_counts, NextToken(), number=4)
    assert count(batch).keys() == NextToken().counts(batch).keys()
    for name, whole in NextToken().counts(batch).items():
        np.testing.assert_allclose(count(batch)[name], whole, rtol=1e-6)
    assert not {"scan", "while"} & {equation.primitive.name for equation in jax.make_jaxpr(count)(batch).eqns}


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_variable_is_updated_from_the_sums_of_the_global_batch_and_kept_in_the_state(first_step, rng, packed_batch):
    batch = packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)
    _, metrics, variables = first_step(batch, Layout({"data": 2}, microbatches=2), PenalisedLlama())
    seen = variables["layers"]["block"]["seen"]
    assert seen.shape == (MODEL.layers, MODEL.embed)
    assert (seen > 0).all()
    np.testing.assert_allclose(metrics["activity"] * metrics["tokens"], 0.01 * seen.sum(), rtol=1e-5)


def test_the_state_says_every_leaf_in_axes():
    made = Program(
        PenalisedLlama(), Layout({"data": 2}, zero=1), AdamW(Constant(1e-3)), batch=8, seq=8, devices=jax.devices()[:2]
    )
    state = made.init()
    for (path, spec), leaf in zip(jax.tree_util.tree_leaves_with_path(made.specs), jax.tree.leaves(state), strict=True):
        assert (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype), path
        assert leaf.sharding.is_equivalent_to(made.placement.sharding(spec.axes, spec.kind), leaf.ndim), path


@pytest.mark.full
def test_given_parameters_are_compared_with_the_models():
    made = Program(MODEL, Layout({"data": 1}), AdamW(Constant(1e-3)), batch=8, seq=8, devices=jax.devices()[:1])
    values = jax.device_get(made.init().parameters)
    values["head"] = values["head"].astype(np.float16)
    values["embedding"]["table"] = values["embedding"]["table"][:10]
    values["embeding"] = values["norm"].pop("scale")
    with pytest.raises(UserError) as refused:
        made.init(values)
    for line in (
        "norm/scale: missing",
        "embeding: not a parameter of the model",
        "embedding/table: shape (10, 16), the model's is (48, 16)",
        "head: dtype float16, the model's is float32",
    ):
        assert line in str(refused.value)


def test_a_weight_that_cannot_be_meant_is_refused():
    with pytest.raises(UserError, match=r"NextToken\.z_loss is -1.0; must be at least 0"):
        NextToken(-1.0)


class Halves:
    """Another loss of each token."""

    def values(self, module, batch, key=None):
        (nll, lse), auxiliary = super().values(module, batch, key)
        return (0.5 * nll, lse), auxiliary


@pytest.mark.full
@pytest.mark.draws(1)
def test_values_that_inherited_sums_do_not_know_of_are_refused_where_their_class_is_defined(
    first_step, rng, packed_batch
):
    with pytest.raises(UserError, match=r"`values` of Halves, and `sums` of NextToken.*add `sums = BySequence.sums`"):
        type("Halved", (Halves, NextToken), {})

    @dataclass(frozen=True)
    class Halved(Halves, NextToken):
        sums = BySequence.sums

    batch = packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)
    of_all, metrics, _ = first_step(batch, Layout({"data": 1}))
    gradients, halved, _ = first_step(batch, Layout({"data": 1}), objective=Halved())
    np.testing.assert_allclose(halved["loss"], 0.5 * metrics["loss"], rtol=1e-6)
    assert_same(gradients, {path: 0.5 * value for path, value in of_all.items()})
