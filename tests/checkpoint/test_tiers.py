"""A run's checkpoints in two folders: the newest of either is restored, and losing the local one loses only that."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.checkpoint import Checkpoints, RunStore, newest_reader, open_store
from axon.errors import UserError

ABSTRACT = {"w": jax.ShapeDtypeStruct((1024,), jnp.float32)}


def state(step: int) -> dict[str, jax.Array]:
    """One array, whose first value is the step, that is too large for the index."""
    return {"w": jnp.asarray(np.random.default_rng(step).random(1024), jnp.float32).at[0].set(step)}


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(every=4, keep=1, local_folder=str(folder / "local"), local_every=1, local_keep=2)


def opened(folder: Path, run: str = "run") -> RunStore:
    return open_store(folder / "durable", checkpoints(folder), run)


def newest(store: RunStore) -> float:
    return float(store.newest(lambda: store.of_step().restore(ABSTRACT))[0]["w"][0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with opened(folder) as store:
        for step in range(1, 8):
            store.save(step, state(step), {"tokens": step}, durable=step == 4)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def spoil(folder: Path) -> None:
    path = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 16]) + content[51:])


def test_the_newest_of_either_is_restored_and_each_keeps_its_own(saved):
    with opened(saved) as store:
        assert store.steps() == [4, 6, 7]
        assert newest(store) == 7
        assert store.of_step(4).extra(4) == {"tokens": 4}
        assert store.started() == 7
        assert store.started(durable=True) == 4
        assert [store.of_step(step).folder(step) for step in (4, None)] == [saved / "durable/4", saved / "local/run/7"]


def test_a_local_folder_that_is_lost_leaves_the_durable_one(copied):
    shutil.rmtree(copied / "local")
    with opened(copied) as store:
        assert newest(store) == 4
        store.save(5, state(5), {}, durable=False)
    with opened(copied) as store:
        assert newest(store) == 5


def test_damaged_local_ones_are_set_aside_and_the_durable_one_is_next(copied):
    for step in (6, 7):
        spoil(copied / f"local/run/{step}")
    with opened(copied) as store:
        assert newest(store) == 4
        assert [line.partition(":")[0] for line in store.notices] == [f"checkpoint {n} is damaged" for n in (7, 6)]
        assert store.started() == 4
    assert (copied / "local/run/7.damaged").is_dir()


def test_a_damaged_durable_one_leaves_the_local_ones(copied):
    with opened(copied) as store:
        store.save(8, state(8), {})
    spoil(copied / "durable/8")
    with opened(copied) as store:
        assert newest(store) == 7


def test_another_run_does_not_find_them(saved):
    with opened(saved, "another") as store:
        assert store.latest() == 4


def test_the_newest_is_read_wherever_it_is_and_nothing_is_changed(copied):
    def reader(run: str | None = "run") -> tuple[int | None, float]:
        found = newest_reader(copied / "durable", checkpoints(copied), run)
        return found.latest(), float(found.restore(ABSTRACT)[0]["w"][0])

    assert reader() == (7, 7)
    assert reader("another") == reader(None) == (4, 4)
    shutil.rmtree(copied / "durable")
    assert reader() == (7, 7)
    assert not (copied / "durable").exists()


def test_a_step_that_is_saved_in_the_local_folder_can_be_saved_in_the_durable_one_too(copied):
    with opened(copied) as store:
        store.save(7, state(7), {"tokens": 7})
    shutil.rmtree(copied / "local")
    with opened(copied) as store:
        assert newest(store) == 7


KILLED = """
import os, sys
from pathlib import Path
from tests.checkpoint.test_tiers import opened, state
with opened(Path(sys.argv[1])) as store:
    store.save(4, state(4), {})
    for step in (5, 6, 7):
        store.save(step, state(step), {}, durable=False)
    if sys.argv[2] == "later":
        store.wait()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.full
@pytest.mark.parametrize("moment", ["now", "later"])
def test_after_kill_9_the_last_whole_one_is_there(tmp_path, moment):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], check=False).returncode == -9
    with opened(tmp_path) as store:
        assert newest(store) == store.latest()
        assert store.latest() == 7 if moment == "later" else store.latest() in (6, 7)


def test_one_of_the_two_fields_alone_is_an_error():
    with pytest.raises(UserError, match="local_every is not set"):
        Checkpoints(local_folder="x")
    with pytest.raises(UserError, match="local_folder is not set"):
        Checkpoints(local_every=2)


@pytest.mark.parametrize(
    ("every", "local_every", "advice"),
    [(200, 200, "local_every to 20"), (200, 600, "local_every to 20"), (3, 4, "local_every to 1"), (1, 1, "every to")],
)
def test_an_interval_at_which_no_save_falls_between_the_durable_ones_is_refused(every, local_every, advice):
    said = rf"local_every is {local_every}; must be less than Checkpoints.every, {every}, .*Set Checkpoints.{advice}"
    with pytest.raises(UserError, match=said):
        Checkpoints(every=every, local_folder="x", local_every=local_every)
