"""Topologies by name: devices to compile for, or a message that helps."""

import pytest

from axon.errors import UserError
from axon.plan import topology
from axon.plan.topology import devices


def test_a_tpu_slice_has_its_chips_as_devices():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    made = devices("v5e:2x4")
    assert [d.platform for d in made] == ["tpu"] * 8


def test_gpus_fill_whole_hosts():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    assert len(devices("h200:4")) == 4
    assert len({d.process_index for d in devices("h200:16")}) == 2


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("v5p8:2x2x1", "Did you mean 'v5p'?"),
        ("h20:8", "Did you mean 'h200'?"),
        ("h200:12", "multiple of 8"),
        ("h200:0", "number of GPUs"),
        ("h200", "number of GPUs"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(name, part):
    with pytest.raises(UserError, match=part.replace("?", r"\?")):
        devices(name)


def test_a_shape_that_the_compiler_refuses_is_a_persons_mistake():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    with pytest.raises(UserError, match="v5e:5x5x5"):
        devices("v5e:5x5x5")


@pytest.mark.parametrize("name", ["v5e:4x4", "h200:8"])
def test_a_missing_compiler_is_named_with_the_extra_that_brings_it(monkeypatch, name):
    monkeypatch.setattr(topology, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="run scripts/setup compilers"):
        devices(name)
