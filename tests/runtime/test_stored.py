"""Arrays in files: what is written is read, by shards; and the folder that they are in."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon.errors import UserError
from axon.runtime.scratch import PREFIX, Scratch
from axon.runtime.stored import Files, StoredArray


def scratch(folder, needed=0):
    return Scratch("optimizer", str(folder), needed)


def folders(path):
    return sorted(one.name for one in path.iterdir() if one.is_dir())


@pytest.fixture
def array(tmp_path):
    """array(shape, dtype, spec, stacked): an array in files, whose parts are split over a mesh of 2 × 2."""
    files = Files(scratch(tmp_path))
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])

    def make(shape, dtype, spec, stacked):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return StoredArray(files, f"{shape}{dtype}", shape, np.dtype(dtype), sharding, stacked)

    return make


def whole(one):
    return one.block((slice(None),) * one.ndim)


@pytest.mark.parametrize(
    ("shape", "dtype", "spec", "stacked"),
    [
        ((3, 8, 6), "float32", ("x", "y"), True),
        ((3, 8), "bfloat16", (None,), True),
        ((3,), "int32", (), True),
        ((8, 6), "float32", (("x", "y"), None), False),
    ],
)
def test_what_is_written_is_read(array, rng, shape, dtype, spec, stacked):
    one = array(shape, dtype, spec, stacked)
    values = rng.normal(size=one.stored_shape).astype(one.dtype)
    for _ in range(2):
        values = -values
        for number, value in enumerate(values):
            one.write(jax.device_put(value, one.part_sharding), number)
        for number in rng.permutation(len(values)):
            found = one.read(number)()
            assert found.sharding == one.part_sharding
            np.testing.assert_array_equal(found, values[number])
    np.testing.assert_array_equal(whole(one), values.reshape(shape))
    np.testing.assert_array_equal(whole(one.fill(np.zeros(shape, one.dtype))), np.zeros(shape))


def test_an_array_in_files_is_no_argument_of_a_compiled_function(array):
    one = array((2, 4), "float32", (None,), True)
    traced = []

    def function(state):
        traced.append(state)
        return state

    compiled = jax.jit(function)
    assert compiled({"a": one, "b": 1.0})["a"] is one
    assert compiled({"a": array((2, 4), "float32", (None,), True), "b": 2.0})["a"] == one
    assert len(traced) == 1


def test_files_that_cannot_be_written_are_an_error_with_their_folder(array):
    one = array((2, 4), "float32", (None,), True)
    one.write(jax.device_put(np.ones(4, np.float32), one.part_sharding))
    one.wait()
    shutil.rmtree(one.files.scratch.path)
    one.files.scratch.path.touch()
    one.write(jax.device_put(np.ones(4, np.float32), one.part_sharding))
    with pytest.raises(UserError, match="continues from the last checkpoint") as caught:
        one.wait()
    assert str(one.files.scratch.path) in str(caught.value)


def test_a_folder_is_deleted_when_nothing_uses_it(tmp_path):
    one = scratch(tmp_path)
    one.claim()
    assert folders(tmp_path) == [one.path.name]
    del one
    assert folders(tmp_path) == []


def test_folders_of_processes_that_were_killed_are_deleted_and_no_others(tmp_path):
    for name in (f"{PREFIX}dead/a", "mine/a"):
        (tmp_path / name).mkdir(parents=True)  # the system frees the locks of a process that is killed
        (tmp_path / name / "zarr.json").touch()
    (tmp_path / f"{PREFIX}photos").mkdir()
    for name in ("zarr.json", "a.jpg"):
        (tmp_path / f"{PREFIX}photos" / name).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "mine")
    alive = scratch(tmp_path)
    alive.claim()
    other = scratch(tmp_path)
    other.claim()
    stays = [f"{PREFIX}link", f"{PREFIX}photos", "mine"]
    assert folders(tmp_path) == sorted([alive.path.name, other.path.name, *stays])
    assert (tmp_path / f"{PREFIX}photos/a.jpg").exists()
    assert (tmp_path / "mine/a/zarr.json").exists()


def test_a_folder_that_is_missing_is_not_created(tmp_path):
    with pytest.raises(UserError, match=r"Execution.disk\['optimizer'\]: there is no folder .*/mnt"):
        scratch(tmp_path / "mnt").claim()


def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(UserError, match=r"cannot write /proc.* Set Execution.disk\['optimizer'\] to a folder"):
        scratch("/proc").claim()


def test_too_little_space_is_refused_with_what_is_needed(tmp_path):
    needed = 10**15  # others may write meanwhile: what is free is not compared
    assert shutil.disk_usage(tmp_path).free < needed
    with pytest.raises(UserError, match=r"has \d.* free, and 1,000 TB are needed"):
        scratch(tmp_path, needed).claim()
    assert folders(tmp_path) == []
