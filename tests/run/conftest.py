"""A run so small that it trains in a second, and one of it that many tests look at."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axon.checkpoint import Checkpoints, Store
from axon.layout import Layout
from axon.run import Sample
from axon.run.convert import convert
from axon.run.folder import RunFolder
from axon.runtime import Runtime
from axon.serve.request import Sampling
from axon.train.spans import SpanCorruption
from models.t5 import T5


@pytest.fixture(scope="session", autouse=True)
def kept(caches) -> None:
    """Most tests of this folder train the same model."""


@pytest.fixture(scope="session")
def trained(tiny, do, tmp_path_factory) -> Any:
    """The run with a sample, done whole and never disturbed. To be looked at only: see `copied`."""
    sample = Sample("alpha beta", Sampling(tokens=8))
    return do(replace(tiny, sample=sample), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="session")
def hub(trained, few, tmp_path_factory) -> Path:
    """The trained run as a folder of the hub's. To be looked at only."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    with few(1):
        convert(str(trained.folder), f"hf:{folder}", lambda line: None)
    return folder


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A copy of the whole run's folder, to do harm to."""
    return Path(shutil.copytree(trained.folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def eight() -> Layout:
    """A layout for all eight devices that splits all there is to split."""
    return Layout(mesh={"data": 4, "tensor": 2}, zero=3)


@pytest.fixture(scope="session")
def answering(tiny, caches, tmp_path_factory, shared_seed) -> Path:
    """The folder of a run of an encoder–decoder, with parameters so random that no two logits are nearly equal. To be
    looked at only."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "answering")
    model = T5(330, 32, 1, 2, heads=4, head_dim=8, mlp=48, buckets=8, max_distance=20, start_id=5)
    folder.write(replace(tiny, model=model, objective=SpanCorruption()), {})
    tiny.data.prepare(lambda line: None).tokenizer.save(folder.tokenizer)
    rng = np.random.default_rng(shared_seed)
    values = Runtime(model, Layout(), devices=jax.devices()[:1]).initialise(0)[0]
    drawn = jax.tree.map(lambda x: jax.device_put(rng.normal(0, 0.4, x.shape).astype(x.dtype), x.sharding), values)
    with Store(folder.checkpoints, Checkpoints()) as store:
        store.save(0, {"parameters": drawn, "variables": {}}, {})
    return folder.path
