"""Every flipped bit of a checkpoint is found before anything of it is used, and named."""

import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store
from axon.checkpoint.checksums import Span, crc32_of

STEP = 7


def state() -> dict[str, Any]:
    values = np.random.default_rng(0).normal(size=(4, 16, 32)).astype(np.float32)
    return {"parameters": {f"w{i}": jnp.asarray(value) for i, value in enumerate(values)}, "step": np.int32(STEP)}


def abstract() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Store(folder, Checkpoints()) as store:
        store.save(4, state(), {"tokens": 4})
        store.save(STEP, state(), {"tokens": 9})
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / str(STEP)).rglob("*")) if path.is_file()]


def flip(path: Path) -> bytes:
    """Flips one bit anywhere in a file; returns what was in it."""
    before = path.read_bytes()
    place = random.randrange(len(before))
    path.write_bytes(before[:place] + bytes([before[place] ^ 1 << random.randrange(8)]) + before[place + 1 :])
    return before


def named(folder: Path) -> list[str]:
    return [one.file for one in Reader(folder).damage(STEP) or []]


def test_what_is_as_it_was_saved_has_no_damage(saved):
    reader = Reader(saved)
    assert [reader.damage(step) for step in reader.steps()] == [[], []]


def test_a_checksum_is_zlibs_crc32_of_the_bytes_of_a_span(tmp_path, rng):
    content = rng.bytes(3 * 2**20 + 5)
    (file := epath.Path(tmp_path / "file")).write_bytes(content)
    start, size = 2**20 - 7, 2**21 + 3
    assert crc32_of(Span(file, start, size)) == zlib.crc32(content[start : start + size])
    with pytest.raises(EOFError):
        crc32_of(Span(file, start, len(content)))


def check_flips(folder: Path, flips: list[Path]) -> None:
    for path in flips:
        before = flip(path)
        assert str(path.relative_to(folder / str(STEP))) in named(folder), f"a flip in {path} was not found"
        path.write_bytes(before)
    assert named(folder) == []


def test_a_flipped_bit_in_any_file_is_found_and_the_file_named(copied):
    check_flips(copied, files(copied))


@pytest.mark.full
def test_many_flipped_bits_anywhere_are_found_one_by_one(copied):
    found = files(copied)
    check_flips(copied, random.choices(found, [path.stat().st_size for path in found], k=100) + 3 * found)


def largest(folder: Path) -> Path:
    """The file with the arrays."""
    return max(files(folder), key=lambda path: path.stat().st_size)


def test_the_array_is_named_and_nothing_is_restored(copied):
    content = largest(copied).read_bytes()
    largest(copied).write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(CheckpointError) as error:
        Reader(copied).restore(abstract())
    assert f"{copied / str(STEP)} cannot be read: it is damaged: parameters/w" in str(error.value)
    assert "can continue from step 4" in str(error.value)
    with pytest.raises(CheckpointError, match="it is damaged"):
        Reader(copied).restore_parts({"step": abstract()["step"]})
    assert Reader(copied).restore(abstract(), step=4)[1] == {"tokens": 4}


@pytest.mark.parametrize("harm", ["shorter", "longer", "gone"])
def test_a_file_of_another_length_is_found(copied, harm):
    path, size = largest(copied), largest(copied).stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] if harm == "shorter" else path.read_bytes() + b"\0")
    if harm == "gone":
        path.unlink()
    why = {"shorter": "it is shorter", "longer": "it is longer", "gone": "it is missing"}[harm]
    assert why in str(Reader(copied).damage(STEP))


def test_checksums_that_are_gone_are_damage(copied):
    shutil.rmtree(copied / str(STEP) / "state/checksums")
    assert "state/checksums/process_0.json" in named(copied)


def test_a_save_killed_before_its_last_checksums_is_still_compared(copied):
    (copied / str(STEP) / "checksums.json").unlink()
    assert named(copied) == []
    flip(largest(copied))
    assert named(copied) == [str(largest(copied).relative_to(copied / str(STEP)))]
