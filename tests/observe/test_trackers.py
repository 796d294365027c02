"""Trackers are tried for real: what was logged is found in the files they write."""

import random
import struct
import sys
from pathlib import Path

import pytest

from axon.errors import UserError
from axon.observe.trackers import TensorBoard, WandB


def tensorboard_scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Every scalar in the event files of a folder: records of length, checksum, protocol buffer, checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for file in sorted(folder.iterdir()):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
            at += 16 + size
    return found


def test_tensorboard_holds_what_was_logged(tmp_path):
    pytest.importorskip("tensorboardX")
    values = [random.random() for _ in range(5)]
    tracker = TensorBoard().open(tmp_path)
    tracker.start({"jax": "0.12"})
    for step, value in enumerate(values, 1):
        tracker.log(step, {"loss": value, "grad_norm": 2 * value})
    tracker.finish()
    found = tensorboard_scalars(tmp_path / "tensorboard")
    assert [(name, step) for name, step, _ in found] == [(n, s) for s in range(1, 6) for n in ("loss", "grad_norm")]
    assert [value for name, _, value in found if name == "loss"] == pytest.approx(values, rel=1e-6)


def test_wandb_offline_holds_what_was_logged_and_resumes_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    marker = f"grad_norm_{random.randrange(10**9)}"
    for step in (1, 2):
        tracker = WandB(project="axon-test").open(tmp_path)
        tracker.start({"jax": "0.12"}, step=step - 1)
        tracker.log(step, {"loss": 0.5, marker: 1.5})
        tracker.finish()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    name = (tmp_path / "wandb" / "id").read_text()
    files = [file for run in runs for file in run.glob("run-*.wandb")]
    assert files
    assert all(file.name == f"run-{name}.wandb" for file in files)
    assert any(marker.encode() in file.read_bytes() for file in files)


@pytest.mark.parametrize(("config", "package"), [(TensorBoard(), "tensorboardX"), (WandB(), "wandb")])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, config, package):
    monkeypatch.setitem(sys.modules, package, None)  # what Python takes for a package that cannot be imported
    with pytest.raises(UserError, match=f"{package}.*run scripts/setup track"):
        config.open(tmp_path)


def test_a_tracker_is_configuration_that_compares_by_value():
    assert WandB("a") == WandB("a")
    assert WandB("a") != WandB("a", offline=False)
    assert TensorBoard() == TensorBoard()
