"""Where JAX is to run and where it keeps what it compiled, unless a person says otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from axon.launch import host
from axon.launch.host import cache_compiled_code, choose_platform, free_memory, keep_freed_memory


@pytest.fixture
def nodes(monkeypatch):
    """nodes("nvidia0"): the device nodes that /dev has."""

    def there(*names):
        monkeypatch.setattr(Path, "glob", lambda self, pattern: (n for n in names if Path(n).match(pattern)))

    monkeypatch.delenv("JAX_PLATFORMS")
    return there


def test_without_an_accelerator_the_platform_is_cpu(nodes, monkeypatch):
    nodes("nvidiactl", "null")
    choose_platform()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("node", ["nvidia0", "accel3", "vfio/0", "kfd"])
def test_with_an_accelerator_jax_chooses(nodes, node):
    nodes(node)
    choose_platform()
    assert "JAX_PLATFORMS" not in os.environ


def test_what_a_person_says_stays(nodes, monkeypatch):
    nodes()
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    choose_platform()
    assert os.environ["JAX_PLATFORMS"] == "tpu"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    cache_compiled_code(Path("elsewhere"))
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"


FAULTS = """
import ctypes, json, resource, sys
from axon.launch.host import keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: each page is one fault
if sys.argv[1] == "keep":
    keep_freed_memory()
import jax, jax.numpy as jnp
square = jax.jit(jax.vmap(lambda x: (x @ x) @ (x @ x).T))  # 4,096 pages are made, used and freed
rows = jax.NamedSharding(jax.make_mesh((len(jax.devices()),), ("row",)), jax.P("row"))
x = jax.device_put(jnp.ones((len(jax.devices()), 2048, 2048)), rows)
faults = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    square(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(faults))
"""


@pytest.mark.full
@pytest.mark.draws(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_finds_the_memory_of_the_step_before(devices):
    def faults(mode):
        command = [sys.executable, "-c", FAULTS, mode]
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        made = subprocess.run(command, env=os.environ | flags, capture_output=True, check=True)
        return json.loads(made.stdout)[4:]

    # Of a few steps, as XLA's threads may take some of the memory in between, or leave some.
    assert 8 * min(faults("keep")) < median(faults("give"))


def test_on_an_accelerator_memory_and_dispatch_stay_as_they_are(monkeypatch):
    import jax

    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("JAX was told something"))
    keep_freed_memory()


def test_memory_is_free_as_far_as_the_system_and_the_container_allow(tmp_path, monkeypatch):
    meminfo, *limits = (tmp_path / name for name in ("meminfo", "max", "limit"))
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    monkeypatch.setattr(host, "_LIMITS", limits)
    assert free_memory() is None
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:   500 kB\nSwapTotal: 100 kB\nSwapFree:     70 kB\n")
    assert free_memory() == 570 * 1024
    limits[0].write_text("max\n")
    assert free_memory() == 570 * 1024
    limits[1].write_text("4096\n")
    assert free_memory() == 4096
