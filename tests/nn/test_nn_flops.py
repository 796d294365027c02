"""FLOPs that a model says of itself, against counts of traced products and against the field's formula."""

import jax
import numpy as np
import pytest
from flax import nnx

from axon.nn import Embedding, Param, Routing, parameters
from axon.nn.flops import forward_flops
from axon.plan.flops import count_flops
from axon.tune import ActorCritic, RewardModel, TextClassifier
from models.gpt2 import GPT2
from models.llama import Llama
from models.mixtral import Mixtral

LLAMA = Llama(vocab=64, embed=24, layers=3, heads=4, kv_heads=2, mlp=40)
CONFIGS = [
    LLAMA,
    Llama(
        vocab=61, vocab_multiple=64, embed=16, layers=2, heads=4, kv_heads=4, head_dim=6, mlp=24, tied=True, bias=True
    ),
    GPT2(vocab=64, embed=16, layers=2, heads=4, mlp=24, positions=32),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "tied, biases", "gpt2"])
def test_a_causal_model_is_6_times_its_matrices_and_6_times_its_attention(config, rng):
    """PaLM's formula (arXiv:2204.02311, appendix B), causal attention counted once."""
    seq, dims = int(rng.integers(2, 64)), config.dims
    matrices = [spec.size for path, spec in parameters(config.build()).items() if is_matrix(path)]
    head = dims["vocab"] * dims["embed"]
    attention = 6 * config.layers * dims["heads"] * dims["head_dim"] * seq
    assert config.build().flops_per_token(seq) == 6 * (sum(matrices) + head) + attention


def test_a_frozen_weight_counts_what_its_backward_still_has():
    """By hand: 2 forward, 2 for a weight's gradient, 2 to pass a gradient on to something trained below."""
    model, seq = LLAMA.build(), 16
    specs = parameters(model)
    block = sum(spec.size // LLAMA.layers for path, spec in specs.items() if is_matrix(path))
    down, head = LLAMA.embed * LLAMA.mlp, LLAMA.embed * LLAMA.vocab
    scores = LLAMA.heads * LLAMA.dims["head_dim"] * seq  # forward 2 of these in a layer, and 4 to pass a gradient on
    layers = {path for path in specs if path.startswith("layers/")}
    around = {"embedding/table", "norm/scale"}
    forward = LLAMA.layers * (2 * block + 2 * scores)
    passed_on = LLAMA.layers * (2 * block + 4 * scores)
    assert around | layers | {"head"} == set(specs)

    def count(*frozen):
        return model.flops_per_token(seq, set().union(*frozen))

    assert count() == 3 * (forward + 2 * head)
    assert count(layers) == forward + passed_on + 6 * head  # the embedding is trained below
    assert count(layers, around) == forward + 4 * head
    assert count(layers, {"embedding/table"}) == forward + 6 * head  # the norm is trained below the head
    assert count(layers, around, {"head"}) == forward + 2 * head
    only_down = layers - {"layers/block/mlp/down"}
    assert count(only_down, around, {"head"}) == forward + passed_on + LLAMA.layers * 2 * down + 4 * head


def test_what_is_scored_has_no_head_of_tokens_and_a_critic_of_its_own_counts_beside(rng):
    seq, frozen = int(rng.integers(1, 50)), {"layers/block/mlp/down"}
    plain, head = LLAMA.build(), 2 * LLAMA.embed * LLAMA.vocab
    scored, classified = RewardModel(LLAMA).build(), TextClassifier(LLAMA, ("a", "b")).build()
    assert scored.flops_per_token(seq) == classified.flops_per_token(seq) == plain.flops_per_token(seq) - 3 * head
    every = set(parameters(plain))
    assert scored.flops_per_token(seq, every) == plain.flops_per_token(seq, every) - head  # forward alone
    assert ActorCritic(LLAMA).build().flops_per_token(seq, frozen) == plain.flops_per_token(seq, frozen)
    both = ActorCritic(LLAMA, LLAMA).build()
    assert both.flops_per_token(seq) == plain.flops_per_token(seq) + scored.flops_per_token(seq)
    in_critic = {f"critic/model/{path}" for path in frozen}
    assert both.flops_per_token(seq, in_critic) == plain.flops_per_token(seq) + scored.flops_per_token(seq, frozen)


def test_experts_are_frozen_by_what_a_token_chooses():
    model = Mixtral(vocab=64, embed=8, layers=1, heads=2, kv_heads=2, mlp=16, routing=Routing(8, 2)).build()
    experts = {path for path in parameters(model) if path.split("/")[-1] in ("gate", "up", "down")}
    assert model.flops_per_token(4) - model.flops_per_token(4, experts) == 2 * 2 * 3 * 8 * 16


def is_matrix(path):
    return path.startswith("layers/") and path.split("/")[-1] in ("query", "key", "value", "out", "gate", "up", "down")


def test_the_count_is_that_of_the_products_of_a_plain_model(rng):
    layers, heads, head_dim, seq, mlp, vocab = (int(n) for n in 2 * rng.integers(1, 5, 6))
    embed = heads * head_dim
    shape = lambda *s: jax.ShapeDtypeStruct(s, "float32")  # noqa: E731
    weights = [(shape(embed, 4 * embed), shape(embed, mlp), shape(mlp, embed))] * layers

    def loss(weights, head, x):
        for square, up, down in weights:
            q, k, v, o = (square[:, i * embed : (i + 1) * embed] for i in range(4))
            q, k, v = ((x @ w).reshape(seq, heads, head_dim).swapaxes(0, 1) for w in (q, k, v))
            x = ((q @ k.swapaxes(1, 2)) @ v).swapaxes(0, 1).reshape(seq, embed) @ o
            x = (x @ up) @ down
        return (x @ head).sum()

    counted = count_flops(jax.grad(loss, (0, 1, 2)), weights, shape(embed, vocab), shape(seq, embed)).flops
    model = GPT2(vocab=vocab, embed=embed, layers=layers, heads=heads, mlp=mlp).build()
    hidden_half = 6 * layers * heads * head_dim * seq  # this plain one computes the masked half, too
    assert counted / seq == model.flops_per_token(seq) + hidden_half


def test_a_window_saves_what_it_hides():
    counts = [Llama(**vars(LLAMA) | {"window": w}).build().flops_per_token(64) for w in (1, 8, 63, 64, 1000, None)]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2] == counts[3] == counts[4] == counts[5]
    seen = np.mean([min(i + 1, 8) for i in range(64)])
    assert counts[-1] - counts[1] == round(3 * 3 * 4 * 4 * 6 * (32 - seen))


class Half(nnx.Module):
    """Matrices, a bias with two axes, a look-up, and something that counts its own."""

    def __init__(self):
        dims = {"embed": 4, "mlp": 6, "heads": 2, "head_dim": 3}
        self.up, self.bias, self.scale = (
            Param("embed mlp", dims),
            Param("heads head_dim", dims, decay=False),
            Param("mlp", dims),
        )
        self.inner, self.table = Sparse(), Embedding("vocab", {"vocab": 9, "embed": 4}, 1.0)
        self.several = nnx.List([Param("embed mlp", dims), Param("mlp embed", dims)])


class Sparse(nnx.Module):
    def __init__(self):
        self.huge = Param("embed mlp", {"embed": 1000, "mlp": 1000})

    def flops(self, seq):
        return 7 * seq


def test_a_module_counts_its_matrices_and_its_children_unless_they_say_otherwise():
    assert forward_flops(Half(), 5) == 3 * 2 * 4 * 6 + 7 * 5
