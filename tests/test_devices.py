"""Where JAX is to run and where it keeps what it compiled, unless a person says otherwise."""

from pathlib import Path

import pytest

from axon.devices import cache_compiled_code, choose_platform


@pytest.fixture
def nodes(monkeypatch):
    """nodes("nvidia0"): the device nodes that /dev has."""

    def there(*names):
        monkeypatch.setattr(Path, "glob", lambda self, pattern: (n for n in names if Path(n).match(pattern)))

    monkeypatch.delenv("JAX_PLATFORMS")
    return there


def test_without_an_accelerator_the_platform_is_cpu(nodes, monkeypatch):
    import os

    nodes("nvidiactl", "null")
    choose_platform()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("node", ["nvidia0", "accel3", "vfio/0", "kfd"])
def test_with_an_accelerator_jax_chooses(nodes, node):
    import os

    nodes(node)
    choose_platform()
    assert "JAX_PLATFORMS" not in os.environ


def test_what_a_person_says_stays(nodes, monkeypatch):
    import os

    nodes()
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    choose_platform()
    assert os.environ["JAX_PLATFORMS"] == "tpu"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    cache_compiled_code(Path("elsewhere"))
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
