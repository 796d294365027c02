"""A checkpoint of padded layers is one of the layers: it fits whatever has the same, with other padding or none."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import ArraySpec
from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store
from axon.layout import Layout, Placement

LAYERS = 6
STORED = {1: 6, 2: 6, 4: 8, 8: 16}
"""Stages → layers stored: a stage may have nothing but padding."""


def specs(stored: int, layers: int = LAYERS) -> dict[str, Any]:
    unpadded = (layers, 4) if stored != layers else None
    up = ArraySpec(("layers", "embed"), (stored, 4), jnp.float32, "params", unpadded=unpadded)
    mean = ArraySpec(("layers", "_1"), (stored, 1), jnp.bfloat16, unpadded=None if stored == layers else (layers, 1))
    return {"parameters": {"up": up, "head": ArraySpec(("embed",), (4,))}, "optimizer": {"mean": mean}}


def abstract(specs: Any, stages: int) -> Any:
    placement = Placement.of(Layout({"pipe": stages}), jax.devices()[:stages])

    def leaf(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=placement.sharding(spec.axes, spec.kind))

    return jax.tree.map(leaf, specs)


@pytest.fixture
def state(rng):
    """state(stages): the same layers, padded with zeros for that many stages, and the specifications."""
    drawn = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), specs(LAYERS))

    def make(stages: int) -> tuple[Any, Any]:
        declared = specs(STORED[stages])

        def leaf(value: np.ndarray, spec: ArraySpec, target: Any) -> jax.Array:
            missing = [(0, size - have) for size, have in zip(spec.shape, value.shape, strict=True)]
            return jax.device_put(np.pad(value, missing), target.sharding)

        return jax.tree.map(leaf, drawn, declared, abstract(declared, stages)), declared

    return make


def save(folder: Path, state: Any, specs: Any) -> None:
    with Store(folder, Checkpoints(asynchronous=False)) as store:
        store.save(1, state, {"tokens": 3}, specs)


def check_same(restored: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert one.sharding == other.sharding


@pytest.mark.parametrize("saved", STORED)
@pytest.mark.parametrize("restored", STORED)
def test_layers_are_restored_bit_for_bit_on_any_number_of_stages(saved, restored, state, tmp_path):
    save(tmp_path, *state(saved))
    expected, declared = state(restored)
    found, extra = Reader(tmp_path).restore(abstract(declared, restored), specs=declared)
    check_same(found, expected)
    assert extra == {"tokens": 3}


def test_parts_of_a_state_are_restored_without_the_padding(state, tmp_path):
    save(tmp_path, *state(4))
    expected, declared = state(1)
    part = {"parameters": declared["parameters"]}
    found = Reader(tmp_path).restore_parts(abstract(part, 1), specs=part)
    check_same(found, {"parameters": expected["parameters"]})


@pytest.mark.parametrize(("saved", "restored"), [(4, 1), (1, 4)])
def test_numpy_arrays_have_the_padding_asked_for(saved, restored, state, tmp_path):
    save(tmp_path, *state(saved))
    expected, declared = state(restored)
    found, _ = Reader(tmp_path).restore(
        jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), declared), specs=declared
    )
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize("declared", [specs(8, layers=8), specs(8, layers=7), specs(16, layers=8)])
def test_another_number_of_layers_is_refused_even_if_as_many_are_stored(declared, state, tmp_path):
    save(tmp_path, *state(4))
    layers = declared["parameters"]["up"].logical_shape[0]
    with pytest.raises(CheckpointError) as caught:
        Reader(tmp_path).restore(abstract(declared, 4), specs=declared)
    assert f"parameters/up: shape (6, 4) in the checkpoint, ({layers}, 4) here" in str(caught.value)
    assert f"optimizer/mean: shape (6, 1) in the checkpoint, ({layers}, 1) here" in str(caught.value)


def test_a_checkpoint_without_padding_is_written_as_ever(state, tmp_path):
    save(tmp_path / "plain", *state(2))
    save(tmp_path / "padded", *state(4))
    of = {
        name: json.loads((tmp_path / name / "1" / "_CHECKPOINT_METADATA").read_text()) for name in ("plain", "padded")
    }
    assert of["plain"]["custom_metadata"] == {"extra": {"tokens": 3}}
    assert of["padded"]["custom_metadata"]["extra"] == {"tokens": 3}
