import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from axon.layout import Layout
from axon.runtime import Runtime
from models.llama import Llama

SMALL = Llama(vocab=32, embed=16, layers=1, heads=2, kv_heads=2, mlp=32)
FOLDER, LEAST = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def cache(tmp_path):
    """An empty folder in which every compiled program is kept."""
    before = {name: getattr(jax.config, name) for name in (FOLDER, LEAST)}
    jax.config.update(FOLDER, str(tmp_path))
    jax.config.update(LEAST, 0.0)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(("mesh", "kept"), [({"data": 1}, True), ({"data": 2}, False)])
def test_a_mesh_of_several_cpu_devices_has_no_programs_from_the_cache(mesh, kept, cache):
    Runtime(SMALL, Layout(mesh), devices=jax.devices()[: mesh["data"]])
    jax.jit(lambda x: x * 3 + 1)(2.0)
    assert any(cache.iterdir()) == kept
