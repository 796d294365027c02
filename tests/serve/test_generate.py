"""What follows a prompt: against the full forward pass, without a cache, at every token."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout, sequence_parallel, tensor_3d
from axon.nn import Inputs, Routing
from axon.runtime import Runtime
from axon.serve.generate import Generator, next_tokens
from axon.serve.request import Sampling
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant
from axon.train.spans import SpanCorruption
from axon.train.step import Program
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama
from models.mixtral import Mixtral
from models.t5 import T5

VOCAB = 64


def program(model, devices=1, **layout):
    optimizer, devices = AdamW(Constant(1e-3)), jax.devices()[:devices]
    objective = SpanCorruption() if isinstance(model, T5) else NextToken()
    return Program(model, Layout(**layout), optimizer, batch=8, seq=16, objective=objective, devices=devices)


def random_values(program, seed):
    """Parameters, the same for every layout, large enough that no two logits are nearly equal."""
    rng = np.random.default_rng(seed)

    def make(leaf):
        return jax.device_put(rng.normal(0, 0.4, leaf.shape).astype(np.float32), leaf.sharding)

    return jax.tree.map(make, program.abstract_state().parameters)


def variables_of(program):
    """Those of its module before the first step."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.abstract_state().variables)


def llama(**fields):
    return Llama(**{"vocab": VOCAB, "embed": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 48, **fields})


def t5(**fields):
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "heads": 4, "head_dim": 8, "mlp": 48}
    return T5(VOCAB, 32, **{**sizes, "buckets": 8, "max_distance": 20, "start_id": 5, **fields})


@pytest.fixture(scope="module")
def small() -> Program:
    return program(llama())


def inputs(ids):
    tokens = jnp.asarray([ids], jnp.int32)
    return Inputs(tokens, jnp.arange(len(ids))[None], jnp.zeros_like(tokens))


def likeliest(program, values, prompt, ids):
    """The likeliest id in place of each of `ids`, by one forward pass over all of them."""

    def last(values):
        model = program.runtime.bind(values, variables_of(program))
        if model.continues:
            hidden, *_ = model.hidden(inputs([*prompt, *ids]))
        else:
            read = inputs(prompt)
            hidden, _ = model.decode(inputs([model.start_id, *ids]), model.encode(read)[0], read.documents)
        return jnp.argmax(model.output.logits(hidden)[0, -len(ids) - 1 : -1], axis=-1)

    with program.runtime.tracing():
        return np.asarray(jax.jit(last)(values)).tolist()


LATENTS = DeepSeek(
    VOCAB,
    32,
    layers=2,
    first_dense=1,
    heads=4,
    mlp=48,
    expert_mlp=16,
    routing=Routing(8, 2, "sigmoid", groups=2, kept_groups=1, bias_rate=0.1),
    shared=16,
    q_latent=16,
    kv_latent=12,
    nope_dim=6,
    rope_dim=4,
    value_dim=8,
)
MODELS = {
    "llama": llama(layers=2),
    "window": llama(layers=2, window=5, qk_norm=True, bias=True, tied=True),
    "gpt2": GPT2(VOCAB, 32, 2, 4, 48, 128),
    "alternating windows": Gemma(VOCAB, 32, 5, 4, 2, 48, 8, window=6, soft_cap=5.0, logit_soft_cap=30.0, unroll=False),
    "latents": LATENTS,
    "experts": Mixtral(VOCAB, 32, 2, 4, 2, 24, Routing(8, 2), qk_norm=True, head_dim=16),
    "biased experts": GptOss(VOCAB, 32, 2, 4, 2, 24, 8, Routing(4, 2), window=6),
    "answers": t5(),
    "scanned answers": t5(gated=False, tied=True, unroll=False),
}


@pytest.mark.few(model=("window", "scanned answers"))
@pytest.mark.parametrize("model", MODELS)
def test_temperature_0_takes_what_the_full_forward_pass_finds_likeliest(model, seed, rng):
    of = program(MODELS[model])
    values = random_values(of, seed)
    prompt = rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()
    ids = Generator(of.runtime)(values, prompt, Sampling(tokens=12, temperature=0), variables_of(of))
    assert ids == likeliest(of, values, prompt, ids)


@pytest.mark.full
def test_a_prompt_may_be_longer_than_the_rows_and_end_on_a_padding_boundary(small, seed, rng):
    values = random_values(small, seed)
    for length in (64, 65):
        prompt = rng.integers(0, VOCAB, length).tolist()
        ids = Generator(small.runtime)(values, prompt, Sampling(tokens=3, temperature=0))
        assert ids == likeliest(small, values, prompt, ids)


@pytest.mark.full
def test_the_likeliest_token_alone_is_what_top_k_1_a_tiny_top_p_and_min_p_1_leave(small, seed, rng):
    values = random_values(small, seed)
    prompt = rng.integers(0, VOCAB, 7).tolist()
    greedy = Generator(small.runtime)(values, prompt, Sampling(tokens=10, temperature=0))
    assert Generator(small.runtime)(values, prompt, Sampling(tokens=10, temperature=3.0, top_k=1)) == greedy
    assert Generator(small.runtime)(values, prompt, Sampling(tokens=10, temperature=3.0, top_p=1e-6)) == greedy
    assert Generator(small.runtime)(values, prompt, Sampling(tokens=10, temperature=3.0, min_p=1.0)) == greedy


def test_the_seed_decides(small, seed, rng):
    values = random_values(small, seed)
    prompt = rng.integers(0, VOCAB, 7).tolist()
    texts = [Generator(small.runtime)(values, prompt, Sampling(20, 5.0, seed=s)) for s in (seed, seed, seed + 1)]
    assert texts[0] == texts[1] != texts[2]


LAYOUTS = {
    "zero": {"mesh": {"data": 4, "tensor": 2}, "zero": 3},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"data": 2, "tensor": 2}, "zero": 3, "rows": sequence_parallel()},
    "head_dim": {"mesh": {"tensor": 2}, "rows": {"heads": None, "kv_heads": None, "head_dim": "tensor"}},
    "3-d": {"mesh": {"z": 2, "x": 2, "y": 2}, **tensor_3d()},
}


@pytest.mark.few(model=("continues",), layout=("sequence",))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["continues", "answers"])
def test_text_does_not_depend_on_the_layout(model, layout, seed, rng):
    prompt, sampling = rng.integers(0, VOCAB, 9).tolist(), Sampling(tokens=12, temperature=0.7, top_k=20, seed=seed)
    config, rows = {"continues": llama(), "answers": t5()}[model], LAYOUTS[layout]
    programs = program(config), program(config, devices=math.prod(rows["mesh"].values()), **rows)
    texts = [Generator(of.runtime)(random_values(of, seed), prompt, sampling) for of in programs]
    assert texts[0] == texts[1]


@pytest.mark.few(model=("answers",))
@pytest.mark.parametrize("model", ["continues", "answers"])
def test_what_pads_a_prompt_changes_nothing(model, seed, rng):
    of = program({"continues": llama(), "answers": t5()}[model])
    values, prompt = random_values(of, seed), rng.integers(0, VOCAB, (2, 9))

    def first(values, tokens):
        model = of.runtime.bind(values, variables_of(of))
        return model.output.logits(model.prefill(tokens, jnp.int32(9), 1)[0])

    found = []
    for size in (0, 55):
        padding = rng.integers(0, VOCAB, (2, size))
        with of.runtime.tracing():
            found.append(jax.jit(first)(values, np.concatenate([prompt, padding], axis=1, dtype=np.int32)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)


def drawn(logits, sampling, count=4000):
    keys = jax.random.split(jax.random.key(0), count)
    rows = np.broadcast_to(logits, (count, len(logits)))
    return np.asarray(jax.jit(lambda rows, keys: next_tokens(rows, keys, sampling))(rows, keys))


def test_tokens_are_drawn_with_the_softmax_of_the_tempered_logits(rng):
    logits = rng.normal(size=6).astype(np.float32)
    for temperature in (0.5, 2.0):
        expected = np.exp(logits / temperature) / np.sum(np.exp(logits / temperature))
        found = np.bincount(drawn(logits, Sampling(temperature=temperature)), minlength=6) / 4000
        np.testing.assert_allclose(found, expected, atol=0.05)


@pytest.mark.parametrize(
    ("rule", "left"),
    [({"top_k": 2}, {1, 3}), ({"top_p": 0.6}, {1, 3}), ({"min_p": 0.7}, {1, 3}), ({"top_k": 3, "top_p": 0.5}, {1, 3})],
)
def test_each_rule_reaches_the_draw(rule, left):
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert set(drawn(logits, Sampling(temperature=1.0, **rule))) == left
    assert set(drawn(logits, Sampling(temperature=1.0))) == {0, 1, 2, 3}


@pytest.mark.full
def test_a_text_may_have_as_many_tokens_as_there_are_learned_positions_and_no_more(seed, rng):
    of = program(GPT2(VOCAB, 32, 1, 4, 48, positions=70))
    values, generate = random_values(of, seed), Generator(of.runtime)
    for length in (3, 60):  # both padded beyond
        prompt = rng.integers(0, VOCAB, length).tolist()
        ids = generate(values, prompt, Sampling(tokens=70 - length, temperature=0))
        assert ids == likeliest(of, values, prompt, ids)
        with pytest.raises(UserError, match=rf"a prompt of {length} tokens and {71 - length} more need 71 positions"):
            generate(values, prompt, Sampling(tokens=71 - length))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("tokens", wrong) for wrong in (0, 2**31)),
        *(("temperature", wrong) for wrong in (-0.1, float("inf"))),
        *(("top_k", wrong) for wrong in (0, 2**31)),
        *(("top_p", wrong) for wrong in (0.0, 1.1)),
        ("min_p", 1.5),
        *(("seed", wrong) for wrong in (-1, 2**64)),
    ],
)
def test_what_cannot_be_drawn_by_is_refused(field, value):
    with pytest.raises(UserError, match=rf"Sampling\.{field} is {value}; must be"):
        dataclasses.replace(Sampling(), **{field: value})


def test_another_prompt_or_seed_compiles_nothing_anew(small, seed, rng):
    generate, values = Generator(small.runtime), random_values(small, seed)
    for other in range(3):
        generate(values, rng.integers(0, VOCAB, 5 + other).tolist(), Sampling(tokens=4, temperature=0.5, seed=other))
    assert generate._compiled._cache_size() == 1


def test_generation_is_compiled_with_the_targets_options(small, monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "jit", lambda fn, **options: asked.append(options["compiler_options"]))
    monkeypatch.setattr(small.runtime, "compiler_options", {"an_option": "true"})
    Generator(small.runtime)
    assert asked == [{"an_option": "true"}]


def test_an_encoder_cannot_continue_a_text():
    with pytest.raises(UserError, match="a BertModel cannot write a text: generation needs"):
        Generator(Runtime(Bert(64, 16, 1, 2, 24), Layout({"data": 1}), devices=jax.devices()[:1]))
