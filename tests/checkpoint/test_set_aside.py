"""A run goes on from the newest intact checkpoint, and a damaged one is kept under another name."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store


def state(step: int) -> dict[str, jax.Array]:
    """One array, whose first value is the step, that is too large for the index."""
    return {"w": jnp.asarray(np.random.default_rng(step).random(1024), jnp.float32).at[0].set(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Store(folder, Checkpoints(keep=3)) as store:
        for step in (4, 8, 12):
            store.save(step, state(step), {"tokens": step})
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def spoil(folder: Path, step: int) -> None:
    path = max((folder / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 16]) + content[51:])


def restored(reader: Reader) -> tuple[float, dict]:
    found, extra = reader.restore({"w": jax.ShapeDtypeStruct((1024,), jnp.float32)})
    return float(found["w"][0]), extra


def loaded(reader: Reader) -> float:
    return restored(reader)[0]


def test_the_newest_intact_one_is_next_and_the_step_can_be_saved_again(copied):
    spoil(copied, 12)
    spoil(copied, 8)
    with Store(copied, Checkpoints(keep=3)) as store:
        assert store.newest(lambda: loaded(store)) == 4
        assert store.started() == 4
        assert [line.partition(":")[0] for line in store.notices] == [f"checkpoint {n} is damaged" for n in (12, 8)]
        assert all("w in state/" in line and line.endswith("continuing from step 4") for line in store.notices)
        assert restored(Reader(copied)) == (4, {"tokens": 4})
        store.save(8, state(0), {"tokens": 9})
        store.wait()
        assert store.damage(8) == []
    assert restored(Reader(copied)) == (0, {"tokens": 9})
    assert (copied / "8.damaged/state").is_dir()
    assert (copied / "12.damaged/state").is_dir()
    assert Reader(copied).steps() == [4, 8]


def test_one_that_is_damaged_again_is_kept_besides_the_first(copied):
    for name in ("12.damaged", "12.damaged-2"):
        spoil(copied, 12)
        with Store(copied, Checkpoints(keep=3)) as store:
            store.newest(lambda store=store: loaded(store))
            assert str(copied / name) in store.notices[0]
            store.save(12, state(0), {})


def test_an_earlier_one_than_the_newest_intact_is_left_alone(copied):
    spoil(copied, 4)
    with Store(copied, Checkpoints(keep=3)) as store:
        assert store.newest(lambda: loaded(store)) == 12
        assert store.notices == []
        assert store.steps() == [4, 8, 12]


def test_if_all_are_damaged_nothing_is_renamed(copied):
    for step in (4, 8, 12):
        spoil(copied, step)
    every = pytest.raises(
        CheckpointError, match=r"every checkpoint in .* is damaged:\n  step 12: w in state/(.|\n)*step 4"
    )
    with every, Store(copied, Checkpoints(keep=3)) as store:
        store.newest(lambda: loaded(store))
    assert Reader(copied).steps() == [4, 8, 12]
