"""The language model: generation's path gives the same distribution as training's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes import Execution, einsum
from axon.layout import Layout
from axon.nn import (
    Auxiliary,
    Depth,
    Inputs,
    LanguageModel,
    Param,
    RMSNorm,
    Rope,
    Routing,
    Segment,
    Variable,
    YarnScaling,
    cross_entropy,
)
from axon.nn.language_model import RESIDUAL
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama

EXPERTS = Routing(8, 2, "sigmoid", groups=2, kept_groups=1, bias_rate=0.1)
MODELS = [
    Llama(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, tied=True),
    Llama(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, window=5),
    GPT2(vocab=32, embed=16, layers=2, heads=4, mlp=24, positions=16),
    Gemma(32, 16, 3, 4, 2, 24, 4, window=5, local_rope=Rope(100.0), qk_norm=True, soft_cap=1.0, logit_soft_cap=2.0),
    GptOss(32, 16, 2, 4, 2, 24, 4, Routing(4, 2), window=5, rope=Rope(100.0, YarnScaling(4.0, 16))),
    DeepSeek(32, 16, 2, 1, 4, 24, 8, EXPERTS, 8, q_latent=None, kv_latent=12, nope_dim=6, rope_dim=4, value_dim=8),
]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(mesh=[None], config=MODELS[3:])
@pytest.mark.parametrize("config", MODELS, ids=["tied", "window, scanned", "gpt2", "gemma", "gpt-oss", "deepseek"])
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tensor": 2}])
def test_logits_token_by_token_are_those_of_the_whole_row_and_give_its_loss(
    config, mesh, rng, placed, compiled, bind, random_parameters
):
    module = config.build()
    values = random_parameters(module, rng)
    ids = rng.integers(0, 32, (2, 13), dtype=np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))

    def run(values):
        model = bind(module, values)
        x, *_ = model.hidden(Inputs(ids[:, :-1], positions))
        whole = model.output.logits(x)
        objective, nll = cross_entropy(x, model.output, ids[:, 1:], jnp.ones((2, 12)))

        def one(cache, start):
            at = jnp.broadcast_to(start, (2, 1))
            inputs = Inputs(jax.lax.dynamic_slice_in_dim(jnp.asarray(ids), start, 1, 1), at, start=start)
            x, cache, _ = model.hidden(inputs, cache)
            return cache, model.output.logits(x)[:, 0]

        _, single = jax.lax.scan(one, model.cache(2, 15), jnp.arange(12, dtype=jnp.int32))
        return whole, jnp.swapaxes(single, 0, 1), nll, objective

    execution = Execution(unroll=False if config is MODELS[1] else None)
    whole, single, nll, objective = (np.asarray(a) for a in compiled(placed(mesh), run, values, execution=execution))
    np.testing.assert_allclose(single, whole, rtol=1e-4, atol=1e-4)
    lse = np.log(np.exp(whole.astype(np.float64)).sum(-1))
    expected = np.sum(lse - np.take_along_axis(whole, ids[:, 1:, None], -1)[..., 0])
    np.testing.assert_allclose([nll, objective], expected, rtol=1e-5)


def test_what_a_step_looks_up_of_its_pages_is_made_before_the_layers_and_not_in_them(rng, bind, random_parameters):
    module = MODELS[1].build()
    values, tokens = random_parameters(module, rng), jnp.zeros((2, 4), jnp.int32)

    def run(values):
        model = bind(module, values)
        return model.hidden(Inputs(tokens, tokens, start=jnp.int32(3)), model.cache(2, 15))[0]

    program = jax.make_jaxpr(run)(values)
    loops = [str(eqn.params["jaxpr"]) for eqn in program.eqns if eqn.primitive.name == "scan"]
    (layers,) = [text for text in loops if "while" in text]  # over pages
    assert "cumsum" in str(program), "which numbers blocks of queries"
    assert "cumsum" not in layers


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", [None, {"data": 2, "tensor": 4}])
def test_padding_of_the_vocabulary_is_never_predicted_and_never_counted(
    tied, mesh, rng, placed, compiled, bind, random_parameters
):
    config = Llama(vocab=29, vocab_multiple=8, embed=16, layers=1, heads=4, kv_heads=4, mlp=24, tied=tied)
    module, plain = config.build(), replace(config, vocab_multiple=1).build()
    values = random_parameters(module, rng)
    ids = rng.integers(0, 29, (2, 9), dtype=np.int32)
    inputs = Inputs(ids[:, :-1], np.tile(np.arange(8, dtype=np.int32), (2, 1)))

    def objective(module, values):
        model = bind(module, values)
        return cross_entropy(model.hidden(inputs)[0], model.output, ids[:, 1:], jnp.ones((2, 8)), 0.1)[0]

    def run(values):
        model = bind(module, values)
        return jax.value_and_grad(lambda v: objective(module, v))(values), model.output.logits(model.hidden(inputs)[0])

    (loss, gradients), logits = jax.device_get(compiled(placed(mesh), run, values))
    cut = dict(values, embedding={"table": values["embedding"]["table"][:29]})
    if not tied:
        cut["head"] = values["head"][:, :29]
    np.testing.assert_allclose(loss, compiled(placed(), lambda v: objective(plain, v), cut), rtol=1e-5)
    assert np.all(np.argmax(logits, -1) < 29)
    np.testing.assert_array_equal(jax.nn.softmax(logits)[..., 29:], 0)
    np.testing.assert_array_equal(gradients["embedding"]["table"][29:], 0)
    if not tied:
        np.testing.assert_array_equal(gradients["head"][:, 29:], 0)


class Mixer(nnx.Module):
    """A block with nothing that attends: one matrix, a loss, and a variable that adds up its activations."""

    def __init__(self):
        dims = {"embed": 8, "embed_out": 8}
        self.norm, self.mix = RMSNorm("embed", dims), Param("embed embed_out", dims)
        self.load = Variable("embed_out", dims, update=lambda load, statistic: load + statistic)

    def __call__(self, x, inputs, cache=None):
        h = einsum("batch seq embed, embed embed_out -> batch seq embed_out", self.norm(x, RESIDUAL), self.mix)
        x = einsum("batch seq embed, batch seq -> batch seq embed", x, jnp.tanh(jnp.sum(h, axis=-1)))
        return x, cache, Auxiliary({"size": 1e-3 * jnp.sum(h**2)}, {"load": jnp.sum(h**2, axis=(0, 1))})


class Mixers:
    """Two layers of it."""

    def build(self):
        dims = {"vocab": 16, "embed": 8}
        depth = Depth(Segment(2, mixer=Mixer()))
        return LanguageModel(dims, depth, RMSNorm("embed", dims), tied=True, embedding_stddev=0.1)


def test_a_model_without_heads_trains_and_counts_its_flops(rng, begun, packed_batch):
    layout = Layout({"data": 2}, zero=3, rows={"embed_out": None})
    program = Program(Mixers(), layout, AdamW(Constant(1e-2)), batch=4, seq=8, devices=jax.devices()[:2])
    state, batch, losses = begun(program, rng), program.place(packed_batch(rng, 4, 8, 16)), []
    for _ in range(20):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    load = state.variables["layers"]["mixer"]["load"]
    assert load.shape == (2, 8)
    assert (load > 0).all()
    assert program.module.flops_per_token(8) == 6 * (2 * 8 * 8 + 16 * 8)


def test_auxiliary_terms_of_the_layers_come_with_hidden_by_path(rng, random_parameters):
    module, ids = Mixers().build(), jnp.asarray(rng.integers(0, 16, (2, 8)), jnp.int32)
    values = random_parameters(module, rng)
    values["layers"]["mixer"]["load"] = jnp.zeros((2, 8))
    hidden = jax.jit(lambda values: nnx.merge(nnx.graphdef(module), values).hidden(Inputs(ids, ids)))
    _, cache, auxiliary = hidden(values)
    assert cache is None
    assert auxiliary.losses["size"].shape == ()
    assert {path: x.shape for path, x in auxiliary.statistics.items()} == {"layers/mixer/load": (2, 8)}
