"""A trained run as a folder that runs where there is no Axon."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from reports import silent

from axon.axes import ArraySpec
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Inputs, Routing
from axon.precision import Precision
from axon.run.export import export_model
from axon.run.inspect import runtime_of
from axon.run.trained import open_trained
from axon.serve.export import check_dtypes, check_request
from axon.serve.export_programs import PLATFORMS, Sizes, export_programs
from axon.serve.offline import write
from axon.serve.request import Request, Sampling
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama
from models.t5 import T5

WITHOUT_AXON = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("axon", "models", "flax"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import jax, numpy as np
given, prompt = np.load(sys.argv[2]), [int(one) for one in sys.argv[3].split(",")]
model = runpy.run_path(f"{sys.argv[1]}/run.py")["load"](sys.argv[1])
if "written" in given:
    encoded, logits, cache = model.encode(given["tokens"], given["lengths"])
    steps = [np.asarray(logits)]
    for place, ids in enumerate(given["written"].T, 1):
        logits, cache = model.step(cache, ids[:, None], place)
        steps.append(np.asarray(logits))
    np.savez(sys.argv[4], encoded=encoded, logits=np.stack(steps, axis=1))
else:
    np.savez(sys.argv[4], logits=model.logits(given["tokens"]))
print(*model.generate(prompt, 8))
"""
BATCH, LENGTH = 2, 24


def run(out, path, prompt, **given):
    """What the folder `out` computes of `given` in a process without Axon, and the ids that it writes."""
    np.savez(path / "given.npz", **given)
    arguments = [str(out), str(path / "given.npz"), ",".join(map(str, prompt)), str(path / "found.npz")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_AXON, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return np.load(path / "found.npz"), [int(one) for one in done.stdout.split()]


@pytest.fixture
def axons(few):
    """axons(folder, compute, prompt, *arguments): `compute(model, *arguments)` and the ids after `prompt`, by Axon."""

    def of(folder, compute, prompt, *arguments):
        with few(1):
            trained = open_trained(folder)
            runtime = runtime_of(trained.train, silent)
            values, variables = trained.restore(runtime, trained.train.model, silent)
            with runtime.tracing():
                bound = runtime.jit(lambda values, *given: compute(runtime.bind(values, variables), *given))
                found = bound(values, *arguments)
            asked = [Request(tuple(prompt), Sampling(tokens=8, temperature=0))]
            (answer,) = write(runtime, values, variables, None, asked)
        return found, list(answer.ids)

    return of


def inputs(tokens, documents=None):
    return Inputs(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), documents)


@pytest.mark.full
@pytest.mark.draws(1)
def test_logits_and_text_are_the_same_in_a_process_without_axon(trained, axons, few, rng, tmp_path):
    out, vocab = tmp_path / "out", trained.train.model.vocab
    tokens = rng.integers(0, vocab, (BATCH, LENGTH)).astype(np.int32)
    prompt = rng.integers(0, vocab, 5).tolist()
    with few(1):
        export_model(str(trained.folder), out, ["cpu"], BATCH, LENGTH, silent)
    found, ids = run(out, tmp_path, prompt, tokens=tokens)
    logits, expected = axons(
        trained.folder, lambda model, tokens: model.output.logits(model.hidden(inputs(tokens))[0]), prompt, tokens
    )
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=1e-5)
    assert ids == expected
    manifest = json.loads((out / "manifest.json").read_text())
    described = manifest["programs"]["cpu"]["forward"]["inputs"]
    assert described["tokens"] == {"axes": "batch seq", "shape": [BATCH, LENGTH], "dtype": "int32"}
    with pytest.raises(UserError, match=r"out is there already; give another"):
        export_model(str(trained.folder), out, ["cpu"], BATCH, LENGTH, silent)


@pytest.mark.full
def test_an_encoder_decoder_reads_and_answers_the_same_in_a_process_without_axon(answering, axons, few, rng, tmp_path):
    out, vocab = tmp_path / "out", 330
    tokens, written = (rng.integers(0, vocab, (BATCH, size)).astype(np.int32) for size in (LENGTH, 6))
    lengths, prompt = rng.integers(1, LENGTH + 1, BATCH), rng.integers(0, vocab, 5).tolist()
    with few(1):
        export_model(str(answering), out, ["cpu"], BATCH, LENGTH, silent)
    found, ids = run(out, tmp_path, prompt, tokens=tokens, lengths=lengths, written=written)

    def whole(model, tokens, documents, written):
        encoded, _ = model.encode(inputs(tokens, documents))
        hidden, _ = model.decode(inputs(written, jnp.zeros_like(written)), encoded, documents)
        return encoded, model.output.logits(hidden)

    documents = -(np.arange(LENGTH) >= lengths[:, None]).astype(np.int32)
    begun = np.concatenate([np.full((BATCH, 1), 5, np.int32), written], axis=1)
    (encoded, logits), expected = axons(answering, whole, prompt, tokens, documents, begun)
    read = documents == 0
    np.testing.assert_allclose(found["encoded"][read], np.asarray(encoded)[read], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=1e-4)
    assert ids == expected


MODELS = {
    "llama": Llama(64, 256, 2, 2, 1, 128),  # heads as wide as the TPU's kernels want them
    "latents": DeepSeek(
        64,
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
    ),
    "an encoder–decoder": T5(64, 256, 2, 2, heads=2, head_dim=128, mlp=64),
    "sinks and experts": GptOss(64, 32, 2, 4, 2, 24, 8, Routing(4, 2), window=6),
}


@pytest.mark.full
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_program_is_for_its_platform_and_has_the_arrays_that_the_manifest_says(model, platform):
    programs, choices = export_programs(MODELS[model], Layout(mesh={}), Precision(), platform, Sizes(2, 128))
    assert "attention" in choices
    for program in programs:
        assert program.exported.platforms == (platform,)
        for specs, avals in (
            (program.inputs, program.exported.in_avals),
            (program.outputs, program.exported.out_avals),
        ):
            assert [(s.shape, s.dtype) for s in leaves(specs)] == [(a.shape, a.dtype) for a in avals]
    if (model, platform) == ("llama", "tpu"):
        assert all("tpu" in choices[name] for name in ("attention", "paged_attention"))
        assert all("tpu_custom_call" in program.exported.mlir_module() for program in programs)


def leaves(specs):
    """In the order of a call's operands."""
    for spec in specs.values():
        yield from [spec] if isinstance(spec, ArraySpec) else [spec[path] for path in sorted(spec)]


def test_what_cannot_be_exported_is_refused():
    llama, gpt2 = (config.build() for config in (Llama(64, 32, 1, 4, 2, 48), GPT2(64, 32, 1, 4, 48, positions=70)))
    with pytest.raises(UserError, match="unknown platform 'gpu'; expected some of cpu, cuda, tpu"):
        check_request(llama, ["cpu", "gpu"], Sizes(1, 8))
    for platforms in ([], ["cpu", "cpu"]):
        with pytest.raises(UserError, match="expected each of cpu, cuda, tpu at most once"):
            check_request(llama, platforms, Sizes(1, 8))
    with pytest.raises(UserError, match="--length is 71, and this model has 70 positions: lower it to 70"):
        check_request(gpt2, ["cpu"], Sizes(1, 71))
    for batch, length in [(1, 2**24 + 1), (10**20, 1), (1, 10**20), (2**14, 2**14)]:
        with pytest.raises(UserError, match=rf"--batch {batch} with --length {length} .* lower one of them"):
            check_request(llama, ["cpu"], Sizes(batch, length))
    for dtype in (jnp.int32, jnp.bool_, jnp.float8_e4m3fn):
        with pytest.raises(UserError, match=rf"layers/up is {jnp.dtype(dtype).name}, .*float32.*dtype=jnp\.float32\)"):
            check_dtypes({"layers/up": ArraySpec("embed", (4,), dtype)})
    bert = Bert(64, 32, 1, 4, 48, 16).build()
    with pytest.raises(UserError, match="BertModel cannot be exported: it writes no text"):
        check_request(bert, ["cpu"], Sizes(1, 8))
