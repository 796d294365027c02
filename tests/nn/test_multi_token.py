"""The token after the next: its loss against the formula written out, and where a document or a sequence ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import sequence_parallel
from axon.nn import Inputs, Routing
from axon.train.objective import MultiToken, NextToken
from models.deepseek import DeepSeek
from models.llama import Llama
from models.qwen3_next import Qwen3Next

MODEL = DeepSeek(
    vocab=40,
    embed=16,
    layers=1,
    first_dense=1,
    heads=4,
    mlp=24,
    q_latent=8,
    kv_latent=6,
    nope_dim=4,
    rope_dim=4,
    value_dim=6,
    multi_token=True,
)
MODELS = {
    "latents": MODEL,
    "zero-centred norms": Qwen3Next(
        40, 16, 1, 4, kv_heads=2, mlp=8, head_dim=8, shared=8, routing=Routing(4, 4), norm_eps=1e-3,
        delta_heads=2, per_head=2, key_dim=4, value_dim=4, full_every=2, multi_token=True,
    ),
}  # fmt: skip
"""The second: Gated DeltaNet alone, and attention in its block; all of its experts. Its gradients are those of the
parity suite, whose values are less unlike each other: of these rounding alone makes 1e-5 of the recurrence's."""


def weights_by_hand(batch):
    """1 where the position and the next one are real and of one document."""
    found = np.zeros_like(batch["weights"])
    for row, documents in enumerate(batch["documents"]):
        for i in range(len(documents) - 1):
            real = batch["weights"][row, i] and batch["weights"][row, i + 1]
            found[row, i] = real and documents[i] == documents[i + 1]
    return found


def norm(x, scale, config):
    scale = 1 + scale if isinstance(config, Qwen3Next) else scale
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + config.norm_eps) * scale


def loss_by_hand(config, model, values, batch, weights, objective):
    """The mean of the next token's loss, and `objective.weight` times that of the token after it."""
    inputs, own = Inputs(batch["tokens"], batch["positions"], batch["documents"]), values["mtp"]

    def mean(x, targets, weights):
        logp = jax.nn.log_softmax(x @ values["head"])
        return -jnp.sum(weights * jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]) / weights.sum()

    h, *_ = model.hidden(inputs)
    e = values["embedding"]["table"][batch["targets"]]
    both = [norm(x, own[name]["scale"], config) for x, name in ((e, "embedding_norm"), (h, "hidden_norm"))]
    both = jnp.concatenate(both, axis=-1)
    x, *_ = model.mtp.block(both @ jnp.concatenate([own["from_embedding"], own["from_hidden"]]), inputs)
    second = mean(norm(x, own["norm"]["scale"], config), np.roll(batch["targets"], -1, axis=1), weights)
    return mean(h, batch["targets"], batch["weights"]) + objective.weight * second, second


@pytest.fixture
def problem(request, rng, bind, random_parameters, packed_batch):
    """Parameters, and of these the total loss and the second token's: ours, and by the formula."""
    config, objective = MODELS[request.param], MultiToken(float(rng.uniform(0.1, 1)))
    module = config.build()
    values, batch = random_parameters(module, rng), packed_batch(rng, 2, 16, config.vocab)

    def ours(values):
        sums, counts = objective.sums(bind(module, values), batch), objective.counts(batch)
        total = sum(sums.minimised[name] / counts.get(name, counts["tokens"]) for name in sums.minimised)
        return total, sums.metrics["mtp_loss"] / counts["mtp_loss"]

    def plain(values):
        return loss_by_hand(config, bind(module, values), values, batch, weights_by_hand(batch), objective)

    return values, ours, plain


@pytest.mark.parametrize(
    "problem", ["latents", pytest.param("zero-centred norms", marks=pytest.mark.full)], indirect=True
)
def test_the_loss_is_that_of_the_formula(problem, placed, compiled):
    values, ours, plain = problem
    placement = placed({"context": 2, "tensor": 2}, rows=sequence_parallel())
    np.testing.assert_allclose(compiled(placement, ours, values), jax.jit(plain)(values), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("problem", ["latents"], indirect=True)
@pytest.mark.parametrize("mesh", [None, {"context": 2, "tensor": 2}])
def test_gradients_are_those_of_the_formula(mesh, problem, placed, compiled):
    values, ours, plain = problem
    placement = placed(mesh, rows=sequence_parallel())
    gradients, _ = compiled(placement, jax.grad(ours, has_aux=True), values)
    others, _ = jax.jit(jax.grad(plain, has_aux=True))(values)
    whole = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(others)))
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * max(np.linalg.norm(other), 1e-2 * whole)


def test_positions_count_whose_next_one_is_real_and_of_their_document(rng, placed, compiled, packed_batch):
    batch = packed_batch(rng, 4, 16, 8)
    expected = weights_by_hand(batch).sum()
    assert expected < batch["weights"].sum() - 3  # no sequence's last position, and no document's, is among them
    for mesh in (None, {"data": 2, "context": 4}):
        assert compiled(placed(mesh), MultiToken().counts, batch)["mtp_loss"] == expected


def test_a_model_without_it_is_refused():
    llama = Llama(vocab=8, embed=4, layers=1, heads=1, kv_heads=1, mlp=4).build()
    NextToken().check(llama)
    MultiToken().check(MODEL.build())
    with pytest.raises(UserError, match="MultiToken needs a model that predicts the token after the next"):
        MultiToken().check(llama)


def test_an_objective_that_would_leave_the_block_untrained_is_refused():
    with pytest.raises(UserError, match=r"NextToken would leave the block .* Train\.objective = @MultiToken\(\)"):
        NextToken().check(MODEL.build())
