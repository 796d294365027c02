import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import WORDS

from axon.data import JsonLines


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in WORDS))
    return JsonLines(str(path))


CONFIG = """
include 'tiny.gin'
from likes import short

Train.data = @Rollouts()
Train.objective = @GRPO()
Rollouts.data = @Data()
Rollouts.prompts = (@JsonLines(),)
JsonLines.path = 'prompts.jsonl'
Rollouts.rewards = {'short': @short}
Rollouts.staleness = 1
Rollouts.sampling = @Sampling()
Sampling.tokens = 6
Sampling.temperature = 1.0
Train.steps = 3
Train.layout = @Layout()
Layout.mesh = {'data': 2}
Layout.zero = 3
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(devices, *arguments): `axon train` with so many devices a process, in a folder with `run.gin`."""
    here, words = Path(__file__).parent, ["one", "two three", "four", "five", "six seven"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    (tmp_path / "tiny.gin").write_text((here.parent / "tiny.gin").read_text())
    (tmp_path / "run.gin").write_text(CONFIG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(here), os.environ.get("PYTHONPATH", ""))))

    def train(devices, *arguments):
        count = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
        line = [sys.executable, "-m", "axon", "train", *arguments]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    return train
