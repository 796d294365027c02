"""Each family against `transformers`, by the tables that import and export it: its logits, and its gradients by name.

A further family is a config in fixtures/make.py, a name here, and `HUGGING_FACE` in its module.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import (
    GREEDY,
    Reference,
    decoded,
    images,
    last,
    least_norm,
    load,
    prompt,
    relative_error,
    sketch,
    types,
    weights,
)

from axon.checkpoint.huggingface.config import LOCAL, read_config, read_fields, unknown_fields
from axon.checkpoint.huggingface.copies import with_own_arrays
from axon.checkpoint.huggingface.load import check_weights, read_shard
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.save import Theirs, fetch_from
from axon.checkpoint.huggingface.tables import table_for, table_of
from axon.layout import Layout
from axon.nn import ClampedSwiGLU, Inputs, Rope, Routing, YarnScaling, cross_entropy, parameters, variables
from axon.runtime import Runtime, nested
from axon.serve.offline import write
from axon.serve.request import Request, Sampling

HEADED = ("llama_classes", "gemma2_classes", "gpt2_classes", "bert_classes", "qwen2_score")
FAMILIES = (
    "llama31",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt2",
    "phi3",
    "phi4_mini",
    "phi4_mini_short",
    "smollm3",
    "olmo2",
    "olmo3",
    "bert",
    "vit",
    "t5",
    "t5_v1_1",
    *HEADED,
)
WRITERS = tuple(name for name in FAMILIES if name not in ("bert", "vit", *HEADED))


class InMemory:
    """Arrays by name, read as those in files are."""

    folder = "memory"

    def __init__(self, arrays):
        self.arrays, self.shapes = arrays, {name: array.shape for name, array in arrays.items()}

    def read(self, name, where):
        return self.arrays[name][where]

    def item_size(self, name):
        return self.arrays[name].itemsize

    def shape(self, name):
        return self.shapes[name]

    def __contains__(self, name):
        return name in self.arrays


class Family:
    """A fixture, its table, and what the table makes of it."""

    def __init__(self, name: str):
        self.name = name
        self.reference: Reference = load(name)
        self.table = table_of(self.reference.config)
        self.theirs = weights(name, self.reference.shapes | self.reference.buffers)
        said = read_config(self.table, self.reference.config)
        self.config, _ = with_own_arrays(self.table, said, InMemory(self.theirs))

    def ours(self, module):
        """Path → value of every parameter, and of every variable that they have."""
        vocab = getattr(self.config, "vocab", None)
        specs, pieces = parameters(module) | variables(module), pieces_of(self.table, module, vocab)
        source = InMemory(self.theirs)
        check_weights(source, pieces, (), self.name, "the model")
        whole = {path: tuple((0, size) for size in specs[path].shape) for path in pieces.of}
        return {path: read_shard(source, pieces, path, ranges, np.float32) for path, ranges in whole.items()}, pieces


@pytest.fixture(scope="module")
def family():
    return Family


def evaluate(name, model, tokens):
    """The mean next token's negative log-likelihood, and the logits of `tokens[batch seq]`; of images, the class's."""
    batch, seq = tokens.shape
    if name == "vit":
        logits, _ = model.classify(images(batch, *model.image_shape[1:]))
        found = jax.nn.log_softmax(logits)
        return -jnp.mean(found[np.arange(batch), tokens[:, 0]]), logits
    inputs = at_their_places(tokens)
    if name == "bert":
        x, _ = model.hidden(inputs, types(tokens))
        return mean_nll(model.masked_logits(x, "seq"), tokens)
    if name in HEADED:
        logits = headed_logits(name, model, tokens, inputs)
        if name == "qwen2_score":
            return jax.nn.softplus(logits[1] - logits[0])[0], logits
        found = jax.nn.log_softmax(logits)
        return -jnp.mean(found[np.arange(batch), tokens[:, 0] % 3]), logits
    if name.startswith("t5"):
        encoded, _ = model.encode(inputs)
        x, _ = model.decode(at_their_places(decoded(tokens)), encoded, None)
        return mean_nll(model.output.logits(x), tokens)
    counted = np.broadcast_to(np.arange(seq) < seq - 1, tokens.shape) / np.float32(batch * (seq - 1))
    x, *_ = model.hidden(inputs)
    loss, _ = cross_entropy(x, model.output, np.roll(tokens, -1, axis=1), counted)
    return loss, model.output.logits(x)


def headed_logits(name, model, tokens, inputs):
    """Of each text, read at its last token, or at the first by an encoder."""
    if name == "bert_classes":
        x, _ = model.hidden(inputs, types(tokens))
        return model.pooled(x, inputs)[:, 0] @ model.classifier.get_value() + model.classifier_bias.get_value()
    x, *_ = model.hidden(inputs)
    matrix = model.score.get_value()[:, None] if name == "qwen2_score" else model.classifier.get_value()
    return x[np.arange(len(tokens)), last(tokens)] @ matrix


def at_their_places(tokens):
    return Inputs(tokens, np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape))


def mean_nll(logits, tokens):
    """Of the token after each, in nats, by logits that are no language model's head's; and the logits."""
    found = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(found, tokens[:, 1 : logits.shape[1], None], axis=2)), logits


@pytest.mark.few(name=("gpt2", "qwen2_score", "bert_classes"))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(name, family, placed, compiled, bind):
    one = family(name)
    module, reference = one.config.build(), one.reference
    values, pieces = one.ours(module)

    def run(values):
        return evaluate(name, bind(module, nested(values)), reference.tokens)

    (loss, logits), gradients = compiled(placed(), jax.value_and_grad(run, has_aux=True), values)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, reference.loss, rtol=1e-5)
    assert not any(np.any(gradients[path]) for path in variables(module).keys() & gradients.keys())
    theirs = Theirs(pieces, fetch_from(gradients))
    least = least_norm(reference.gradients)
    errors = {n: relative_error(sketch(name, n, theirs(n)), stored, least) for n, stored in reference.gradients.items()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("name", WRITERS)
def test_greedy_text_is_that_of_transformers(name, family):
    one = family(name)
    runtime = Runtime(one.config, Layout(), devices=jax.devices()[:1])
    values, _ = one.ours(runtime.module)
    abstract = runtime.abstract({**runtime.parameters, **runtime.variables})
    state = {
        path: jax.device_put(values.get(path, np.zeros(leaf.shape, leaf.dtype)), leaf.sharding)
        for path, leaf in abstract.items()
    }
    parameters, variables = (nested({p: state[p] for p in of}) for of in (runtime.parameters, runtime.variables))
    read = prompt(one.reference.tokens, one.reference.config["is_encoder_decoder"]).tolist()
    asked = Request(tuple(read), Sampling(GREEDY, temperature=0))
    (answer,) = write(runtime, parameters, variables, None, [asked])
    assert list(answer.ids) == one.reference.greedy.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_comes_in_goes_out_bit_for_bit(name, family):
    one = family(name)
    values, pieces = one.ours(one.config.build())
    theirs = Theirs(pieces, fetch_from(values))
    assert pieces.shapes.keys() == one.theirs.keys()
    for array, stored in one.theirs.items():
        np.testing.assert_array_equal(theirs(array), stored)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_says_all_of_a_model_and_nothing_is_left_over(name, family):
    one = family(name)
    assert table_for(one.config).name == one.table.name or name == "phi3"  # which is a Mistral too
    assert not unknown_fields(one.table, one.reference.config)
    said = {field.split(".")[0] for field in read_fields(one.table, one.reference.config)}
    said |= {"multi_token", *one.table.present}  # a block that is read where it is asked for, and what arrays say
    assert vars(one.config).keys() - LOCAL <= said


@pytest.mark.few(name=("gemma2",), change=[{"soft_cap": None}])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama31", {"rope": Rope(500.0)}),
        ("mistral", {"window": None}),
        ("qwen3", {"norm_eps": 1e-2}),
        ("gemma2", {"soft_cap": None}),
        ("gemma2", {"query_pre_attn_scalar": None}),
        ("gemma3", {"rope": Rope(1e6)}),
        ("phi4_mini", {"rope": Rope(100.0, fraction=0.75)}),
        ("olmo3", {"window": 9}),
        ("t5", {"max_distance": 128}),
        ("qwen3_moe", {"routing": Routing(8, 3, normalise=False)}),
        ("gpt_oss", {"rope": Rope(1000.0)}),
        ("deepseek_v3", {"rope": Rope(1000.0, YarnScaling(40.0, 64, mscale_all_dim=1.0))}),
        ("deepseek_v2_lite", {"interleaved": False}),
        ("deepseek_v2", {"routing": Routing(12, 3, normalise=False, scale=4.0)}),
        (
            "deepseek_v3",
            {"routing": Routing(12, 3, "sigmoid", scale=2.5, groups=3, kept_groups=2, group_best=1, bias_rate=1.0)},
        ),
        ("gpt_oss", {"activation": ClampedSwiGLU()}),
    ],
)
def test_a_field_that_is_not_theirs_is_seen(name, change, family, placed, compiled, bind):
    one = family(name)
    values, _ = one.ours(one.config.build())
    module = replace(one.config, **change).build()
    run = compiled(placed(), lambda values: evaluate(name, bind(module, values), one.reference.tokens), nested(values))
    assert np.abs(run[1] - one.reference.logits).max() > 1e-2
