"""Whatever else lies among checkpoints, nothing but a checkpoint of the run itself is ever deleted or changed."""

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store
from axon.checkpoint.inspect import entries, to_prune
from axon.checkpoint.ownership import is_file_of_checkpoint, obstacle, remove, sweep
from axon.disk import delete_own
from axon.errors import UserError

STATE = {"w": jnp.asarray(np.random.default_rng(0).random(1024), jnp.float32)}
KINDS = (
    "own",
    "damaged",
    "cut short",
    "another run's",
    "a link",
    "with notes",
    "deep notes",
    "foreign",
    "orbax",
    "empty",
)
OWN = ("own", "damaged", "cut short")
"""What the run may delete."""
NAMES = (
    "3",
    "7",
    "11",
    "2019",
    "007",
    "12.damaged",
    "5.orbax-checkpoint-tmp",
    "6.orbax-checkpoint-tmp-1",
    "notes",
    "9" * 20,
)


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of this run, and one of another."""
    found = {}
    for run in ("this", "another"):
        folder = tmp_path_factory.mktemp(run)
        with Store(folder, Checkpoints(), run=run) as store:
            store.save(7, STATE, {})
        found[run] = folder / "7"
    return found


def make(path: Path, kind: str, templates: dict[str, Path], elsewhere: Path) -> None:
    """What there may be at a path; `elsewhere`: what links lead to."""
    if kind == "a link":
        shutil.copytree(templates["this"], elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    elif kind in ("foreign", "orbax", "empty"):
        path.mkdir()
        if kind != "empty":
            (path / "state").mkdir()
            (path / "state/picture.jpg").write_bytes(b"dear")
        if kind == "orbax":
            (path / "_CHECKPOINT_METADATA").write_text('{"custom_metadata": {}, "commit_timestamp_nsecs": 1}')
    else:
        shutil.copytree(templates["another" if kind == "another run's" else "this"], path)
        data = max(path.glob("state/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
        if kind == "damaged":
            data.write_bytes(data.read_bytes()[:-1] + b"?")
        elif kind == "cut short":
            data.write_bytes(b"")
        elif kind == "with notes":
            (path / "notes.txt").write_text("the good one")
        elif kind == "deep notes":
            (path / "state/d/mine").write_text("the good one")


def seen(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder, with its content."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def may_go(name: str, kind: str) -> bool:
    """Whether the run may delete what is there: a checkpoint by a step's name, or remains by theirs."""
    return kind in OWN and (name in NAMES[:4] or "tmp" in name)


trees = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(KINDS), max_size=6)


@settings(max_examples=10)
@given(tree=trees, keep=st.integers(1, 3), steps=st.sets(st.sampled_from([3, 7, 11, 2019]), max_size=2))
def test_of_a_random_tree_nothing_else_is_deleted_and_enough_intact_ones_stay(
    templates, tmp_path_factory, tree, keep, steps
):
    place = tmp_path_factory.mktemp("place")
    folder, elsewhere = place / "checkpoints", place / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    for name, kind in tree.items():
        make(folder / name, kind, templates, elsewhere)
    before = seen(place)
    intact = {int(name) for name, kind in tree.items() if name in NAMES[:4] and kind not in ("damaged", "cut short")}
    intact &= {*Reader(folder).steps()}

    sweep(folder, "this")
    for number in (None, keep):
        try:
            gone, _ = to_prune(Reader(folder), number, sorted(steps), "this")
        except CheckpointError:
            continue
        for step in gone:
            remove(folder / str(step), "this")
    left = intact & {*Reader(folder).steps()}
    assert len(left) >= min(1, len(intact))
    if any(NAMES[i] in tree and tree[NAMES[i]] in ("foreign", "orbax", "empty") for i in range(4)):
        with pytest.raises(CheckpointError, match="is no checkpoint of Axon's: move it elsewhere"):
            Store(folder, Checkpoints(keep=keep), run="this")
    else:
        with Store(folder, Checkpoints(keep=keep), run="this") as store:
            store.save(3000, STATE, {})
        deletable = {int(name) for name, kind in tree.items() if name in NAMES[:4] and may_go(name, kind)}
        left = left & deletable & {*Reader(folder).steps()}
        assert len(left) >= min(keep - 1, len(intact & deletable & {*Reader(folder).steps()}))
    kept = {path: content for path, content in seen(place).items() if "/3000/" not in f"/{path}"}
    assert kept.items() <= before.items()
    for path in before.keys() - kept.keys():
        name = Path(path).parts[1]
        assert path.startswith("checkpoints/")
        assert may_go(name, tree[name]), path


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_the_runs_own_checkpoint_is_refused_by_name(templates, tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    make(tmp_path / "7", kind, templates, tmp_path / "elsewhere")
    before = seen(tmp_path)
    if kind in OWN:
        assert obstacle(tmp_path / "7", "this") is None
        remove(tmp_path / "7", "this")
        assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    else:
        with pytest.raises(CheckpointError, match=f"{tmp_path}/7 is not deleted: "):
            remove(tmp_path / "7", "this")
        assert seen(tmp_path) == before


def test_every_file_of_a_checkpoint_is_known_also_of_one_that_is_deleted_halfway(templates, tmp_path):
    files = seen(templates["this"])
    assert len(files) > 8
    assert all(map(is_file_of_checkpoint, files))
    half = shutil.copytree(templates["this"], tmp_path / "7.orbax-checkpoint-tmp")
    (half / "_CHECKPOINT_METADATA").unlink()
    sweep(tmp_path)
    assert not half.exists()


@pytest.mark.parametrize(
    "text", ["[]", "5", "null", '{"custom_metadata": []}', '{"commit_timestamp_nsecs": 1e999}', "[" * 10**5]
)
def test_metadata_of_another_shape_are_damage(templates, tmp_path, text):
    shutil.copytree(templates["this"], tmp_path / "7")
    (tmp_path / "7/_CHECKPOINT_METADATA").write_text(text)
    reader = Reader(tmp_path)
    assert reader.steps() == [7]
    assert [entry.name for entry in entries(reader) if entry.condition.startswith("damaged")] == ["7"]
    assert reader.damage(7)


def test_a_folder_that_links_into_another_is_not_followed(tmp_path):
    (tmp_path / "dear").mkdir()
    (tmp_path / "dear/lock").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "dear")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/lock").symlink_to(tmp_path / "dear/lock")
    for name in ("link", "own"):
        with pytest.raises(UserError, match="is not Axon's, so"):
            delete_own(tmp_path / name, lambda path: True)
    assert (tmp_path / "dear/lock").read_text() == "mine"
