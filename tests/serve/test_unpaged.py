"""What models write that do not remember in pages: against the full forward pass, without a cache, at every token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn import Auxiliary, CacheSpec, Depth, Inputs, LanguageModel, RMSNorm, Segment
from axon.runtime import Runtime
from axon.serve.request import Finish, Request, Sampling
from axon.serve.unpaged import UnpagedWriter
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant
from axon.train.spans import SpanCorruption
from axon.train.step import Program
from models.bert import Bert
from models.llama import Llama
from models.t5 import T5

pytestmark = pytest.mark.usefixtures("caches")

VOCAB = 64


def program(model, devices=1, **layout):
    optimizer, devices = AdamW(Constant(1e-3)), jax.devices()[:devices]
    objective = SpanCorruption() if isinstance(model, T5) else NextToken()
    execution = Execution(unroll=False if model == MODELS["scanned answers"] else None)
    options = {"objective": objective, "execution": execution, "devices": devices}
    return Program(model, Layout(**layout), optimizer, batch=8, seq=16, **options)


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


MODELS = {"continues": llama(layers=2), "answers": t5(), "scanned answers": t5(gated=False, tied=True)}


def written(writer, prompt, sampling):
    """The ids that follow a prompt, and the last update."""
    updates = list(writer.stream(Request(tuple(prompt), sampling)))
    return [token for update in updates for token in update.ids], updates[-1]


@pytest.fixture(scope="module")
def answering():
    """A writer that all tests may use, of a T5."""
    of = program(MODELS["scanned answers"])
    return UnpagedWriter(of.runtime, random_values(of, np.random.default_rng().integers(2**31)))


def inputs(ids):
    tokens = jnp.asarray([ids], jnp.int32)
    return Inputs(tokens, jnp.arange(len(ids))[None], jnp.zeros_like(tokens))


def likeliest(program, values, prompt, ids):
    """The likeliest id in place of each of `ids`, by one forward pass over all of them."""

    def last(values):
        model = program.runtime.bind(values, variables_of(program))
        if model.start_id is None:
            hidden, *_ = model.hidden(inputs([*prompt, *ids]))
        else:
            read = inputs(prompt)
            hidden, _ = model.decode(inputs([model.start_id, *ids]), model.encode(read)[0], read.documents)
        return jnp.argmax(model.output.logits(hidden)[0, -len(ids) - 1 : -1], axis=-1)

    with program.runtime.tracing():
        return np.asarray(jax.jit(last)(values)).tolist()


@pytest.mark.few(model=("scanned answers",))
@pytest.mark.parametrize("model", MODELS)
def test_temperature_0_takes_what_the_full_forward_pass_finds_likeliest(model, seed, rng):
    of = program(MODELS[model])
    values = random_values(of, seed)
    prompt = rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()
    writer = UnpagedWriter(of.runtime, values, variables_of(of))
    ids, last = written(writer, prompt, Sampling(tokens=12, temperature=0))
    assert ids == likeliest(of, values, prompt, ids)
    assert (len(ids), last.finish) == (12, Finish.LENGTH)


@pytest.mark.full
@pytest.mark.parametrize("model", ["continues", "answers"])
def test_a_prompt_may_end_on_a_padding_boundary(model, seed, rng):
    of = program(MODELS[model])
    values = random_values(of, seed)
    writer = UnpagedWriter(of.runtime, values)
    for length in (64, 65):
        prompt = rng.integers(0, VOCAB, length).tolist()
        ids, _ = written(writer, prompt, Sampling(tokens=3, temperature=0))
        assert ids == likeliest(of, values, prompt, ids)


@pytest.mark.full
def test_what_is_asked_of_draws_is_followed(answering, rng):
    prompt, seed = rng.integers(0, VOCAB, 7).tolist(), int(rng.integers(2**63))
    greedy, _ = written(answering, prompt, Sampling(10, temperature=0))
    for rule in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert written(answering, prompt, Sampling(10, temperature=3.0, **rule))[0] == greedy
    texts = [written(answering, prompt, Sampling(20, 5.0, seed=s))[0] for s in (seed, seed, seed % 2**32, seed + 1)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3
    fresh, _ = written(answering, prompt, Sampling(20, temperature=0, repetition_penalty=1e6, logit_bias={3: -100}))
    assert len({*fresh, 3}) == 21
    ids, last = written(answering, prompt, Sampling(10, temperature=0, stop_ids=(greedy[2],)))
    assert ids == greedy[: greedy.index(greedy[2]) + 1]
    assert last.finish == Finish.STOP


@pytest.mark.full
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


def test_another_prompt_seed_or_rule_compiles_nothing_anew(answering, rng):
    writer, counts = UnpagedWriter(answering.runtime, *answering._weights), []
    for other in range(3):
        prompt = rng.integers(0, VOCAB, 5 + other).tolist()
        written(writer, prompt, Sampling(tokens=4 + other, temperature=other / 2, seed=other))
        counts.append([one._cache_size() for one in (writer._prefill, writer._advance, writer._draw)])
    assert counts[0] == counts[1] == counts[2]


def test_generation_is_compiled_with_the_targets_options(answering, monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "jit", lambda fn, **options: asked.append(options["compiler_options"]))
    monkeypatch.setattr(answering.runtime, "compiler_options", {"an_option": "true"})
    UnpagedWriter(answering.runtime, {})
    assert asked == [{"an_option": "true"}] * 3


def test_an_encoder_cannot_continue_a_text():
    with pytest.raises(UserError, match="a BertModel cannot write a text: generation needs"):
        UnpagedWriter(Runtime(Bert(64, 16, 1, 2, 24), Layout({"data": 1}), devices=jax.devices()[:1]), {})


@dataclass(frozen=True)
class Recurrent:
    """A model of a block that remembers its last state alone."""

    vocab: int

    def build(self):
        dims = {"vocab": self.vocab, "embed": 16}
        depth = Depth(Segment(2, only=Decay(dims)))
        return LanguageModel(dims, depth, RMSNorm("embed", dims), tied=True, embedding_stddev=0.4)


class Decay(nnx.Module):
    """Most of the state before, and the token's own."""

    def __init__(self, dims):
        self.norm, self.embed = RMSNorm("embed", dims), dims["embed"]

    def __call__(self, x, inputs, cache=None):
        state = jnp.zeros_like(x[:, 0]) if cache is None else cache["state"]
        own, states = self.norm(x, "batch seq.residual embed"), []
        for place in range(x.shape[1]):
            state = 0.9 * state + own[:, place]
            states.append(state)
        return jnp.stack(states, axis=1), None if cache is None else {"state": state}, Auxiliary()

    def cache_specs(self, batch, length):
        return {"state": CacheSpec(("batch", "embed"), (batch, self.embed), cache_kind="state")}


def test_no_padding_enters_the_state_of_a_recurrent_block(seed, rng):
    of = program(Recurrent(VOCAB))
    values, prompt = random_values(of, seed), rng.integers(0, VOCAB, 7).tolist()
    ids, _ = written(UnpagedWriter(of.runtime, values, variables_of(of)), prompt, Sampling(tokens=6, temperature=0))
    assert ids == likeliest(of, values, prompt, ids)
