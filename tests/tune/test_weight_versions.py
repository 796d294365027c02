"""Versions of weights that others read: each as it was published, and what is frozen once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.layout import Layout
from axon.nn.lora import LoRA
from axon.runtime import Runtime, flattened, nested
from axon.train.state import State
from axon.tune.weight_versions import WeightReader, WeightVersions
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("transforms", [(), (LoRA(rank=2),)], ids=["all", "adapters"])
def test_a_version_is_as_it_was_published_on_any_layout(transforms, tmp_path, rng):
    written = Runtime(MODEL, Layout({"data": 2}, zero=3), transforms=transforms, devices=jax.devices()[:2])
    read = Runtime(MODEL, Layout({"tensor": 2}), transforms=transforms, devices=jax.devices()[2:4])
    parameters, variables = written.initialise(int(rng.integers(2**31)))
    versions = WeightVersions(tmp_path / "weights", written, 2)
    reader, values = WeightReader(tmp_path / "weights", read), flattened(parameters)
    for step in (3, 4, 6):
        trained = {path: values[path] + step for path, spec in written.parameters.items() if spec.trained}
        moved = values | trained
        assert versions.publish(State(jnp.int32(step), nested(moved), {}, variables)) == step
        versions.wait()
        found = flattened(reader.state(step).parameters)
        for path, value in moved.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)
            place = read.abstract(read.parameters[path]).sharding
            assert found[path].sharding.is_equivalent_to(place, value.ndim)
    folder = tmp_path / "weights"
    size = {one.name: sum(f.stat().st_size for f in one.rglob("*") if f.is_file()) for one in folder.iterdir()}
    assert set(size) == ({"4", "6", "frozen"} if transforms else {"4", "6"})
    assert not transforms or size["6"] < size["frozen"]
    versions.close()
    assert not folder.exists()
