"""What `run.json` says of a run."""

import json
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import jax

from axon.observe import record
from axon.observe.record import git_state, hardware, run_record, versions


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_record_is_json_and_names_the_command_and_the_time():
    record = json.loads(json.dumps(run_record(["axon", "train", "my run.gin"])))
    assert record["command"] == "axon train 'my run.gin'"
    started = datetime.fromisoformat(record["started"])
    assert started.tzinfo == UTC
    assert abs((datetime.now(UTC) - started).total_seconds()) < 60
    assert run_record()["command"].split()[0].strip("'") == sys.argv[0]


def test_versions_are_those_that_run():
    found = versions()
    assert found["jax"] == jax.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found) == {"python", "jax", "jaxlib", "flax", "optax", "orbax", "axon"}


def test_the_version_of_axon_is_that_of_the_distribution_that_we_build():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert record._DISTRIBUTIONS["axon"] == project["name"]


def test_what_a_message_advises_to_set_up_there_is():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    advised = {
        name for file in root.glob("axon/**/*.py") for name in re.findall(r"scripts/setup (\w+)", file.read_text())
    }
    assert {"compilers", "data", "track"} <= advised <= set(extras)


def test_the_commit_is_recorded_and_whether_the_files_differ_from_it(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "model.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "model.py").write_text("a = 2\n")
    assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_a_machine_without_git_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_hardware_is_described():
    found = hardware()
    assert found["devices"] == jax.device_count()
    assert found["device_kind"] == jax.devices()[0].device_kind
    assert found["cpu"]
    assert found["cpu_cores"] >= 1
    assert found["memory_bytes"] > 2**28
