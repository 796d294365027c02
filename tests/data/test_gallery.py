"""Images as batches: an order by seed and step, splits that share nothing, padding, and files that are none."""

import io
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from axon.data import ArrayFiles, Images, Letters
from axon.errors import UserError


@pytest.fixture
def files(tmp_path):
    """files(images, labels): the two as a source."""

    def write(images, labels):
        paths = [str(tmp_path / f"{name}.npy") for name in ("images", "labels")]
        for path, array in zip(paths, (images, labels), strict=True):
            np.save(path, array)
        return ArrayFiles(*paths)

    return write


@pytest.fixture
def gallery(files):
    numbers = np.arange(20)
    images = np.broadcast_to(numbers[:, None, None], (20, 3, 2)).astype(np.uint8)
    return Images(batch=4, source=files(images, numbers), held_out=0.3).prepare(lambda line: None)


def test_batches_are_of_the_pictures_and_depend_on_seed_and_step_alone(gallery):
    with gallery.train(7) as batches:
        first = [next(batches) for _ in range(5)]
    for batch in first:
        np.testing.assert_allclose(batch["image"][:, 0, 0, 0], batch["label"] / 127.5 - 1, rtol=1e-5)
        assert batch["image"].shape == (4, 3, 2, 1)
    with gallery.train(7, start=2, sequences=np.array([1, 3]), left_out=(3,)) as batches:
        again = [next(batches)["label"] for _ in range(2)]
    for labels, number in zip(again, (2, 4), strict=True):
        np.testing.assert_array_equal(labels, first[number]["label"][[1, 3]])
    assert gallery.documents(7, 2)[0]["pictures"] == first[2]["label"].tolist()


def test_the_held_out_pictures_come_once_and_are_never_trained_on(gallery):
    with gallery.held_out() as batches:
        held_out = list(batches)
    assert [batch["weights"].tolist() for batch in held_out] == [[1, 1, 1, 1], [1, 1, 0, 0]]
    seen = np.concatenate([batch["label"][batch["weights"] > 0] for batch in held_out])
    with gallery.train(0) as batches:
        trained = {label for _ in range(7) for label in next(batches)["label"].tolist()}
    assert len(set(seen)) == 6
    assert trained == set(range(20)) - set(seen.tolist())


def test_letters_are_the_same_each_time(tmp_path):
    one, other = (Letters(size=12, channels=2, count=40).pictures() for _ in range(2))
    assert one.images.shape == (40, 12, 12, 2)
    np.testing.assert_array_equal(one.images, other.images)
    assert np.any(one.images != Letters(size=12, channels=2, count=40, seed=1).pictures().images)


def test_the_identity_follows_every_value_and_not_where_or_when_it_was_stored(tmp_path, files, rng, monkeypatch):
    monkeypatch.setattr("axon.data.pictures.HASHED_BYTES", 40)  # several reads
    images, labels = rng.integers(256, size=(20, 3, 2), dtype=np.uint8), rng.integers(5, size=20)

    def digests(images, labels, source=None):
        source = source or files(images, labels)
        return Images(batch=4, source=source).prepare(lambda line: None).identity()["digests"]

    before = digests(images, labels)
    (tmp_path / "elsewhere").mkdir()
    moved = [str(Path(shutil.move(tmp_path / f"{name}.npy", tmp_path / "elsewhere"))) for name in ("images", "labels")]
    assert digests(None, None, ArrayFiles(*moved)) == before
    place = tuple(rng.integers(images.shape))
    changed, relabelled = images.copy(), labels.copy()
    changed[place] ^= 1
    relabelled[place[0]] += 1
    others = [(changed, labels), (images, relabelled), (images[::-1], labels), (images.reshape(20, 2, 3), labels)]
    assert len({*before, *(digests(*other)[0] for other in others)}) == 5


def test_a_picture_that_was_replaced_by_one_of_the_same_size_and_time_is_noticed(tmp_path, files, rng):
    images, labels = rng.integers(256, size=(20, 3, 2), dtype=np.uint8), rng.integers(5, size=20)
    data = Images(batch=4, source=files(images, labels))
    before, stat = data.prepare(lambda line: None).identity(), (tmp_path / "images.npy").stat()
    files(255 - images, labels)
    os.utime(tmp_path / "images.npy", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert data.prepare(lambda line: None).identity() != before


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((5, 4), np.uint8), np.zeros(5, int), r"images\.npy: images are uint8 of shape \(5, 4\)"),
        (np.zeros((5, 4, 4), int), np.zeros(5, int), r"images\.npy: images are int64"),
        (np.full((5, 4, 4), "1"), np.zeros(5, int), r"images\.npy: images are <U1"),
        (np.zeros((5, 4, 4), [("r", np.uint8)]), np.zeros(5, int), r"images\.npy: images are \[\('r', 'u1'\)\]"),
        (
            np.zeros((5, 4, 4), np.uint8),
            np.zeros(4, int),
            r"labels\.npy: .*one integer for each of the 5 images",
        ),
        (np.zeros((5, 4, 4), np.uint8), np.zeros(5), r"labels\.npy: labels are float64 of shape \(5,\)"),
        (np.zeros((5, 4, 4), np.uint8), np.full(5, -1), r"labels\.npy: the least label is -1"),
        (np.zeros((2, 4, 4), np.uint8), np.zeros(2, int), "2 pictures, of which Images.held_out = 0.1 holds out 0"),
    ],
)
def test_arrays_that_are_no_labelled_images_are_refused(images, labels, message, files):
    with pytest.raises(UserError, match=message):
        Images(batch=2, source=files(images, labels)).prepare(lambda line: None)


def _bytes(write, *arrays, **named) -> bytes:
    """What one of NumPy's functions writes to a file."""
    file = io.BytesIO()
    write(file, *arrays, **named)
    return file.getvalue()


ARRAY = _bytes(np.save, np.zeros((5, 4, 4)))
ARCHIVE = _bytes(np.savez, images=np.zeros((5, 4, 4)), labels=np.zeros(5, int))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no", "it begins with b'no'"),
        (b"", "it begins with b''"),
        (pickle.dumps([1, 2]), "it begins with"),
        (_bytes(np.save, np.array([{}, 1], object)), "Python objects"),
        (ARRAY[:-8], "mmap length is greater than file size"),
        (ARRAY[:10] + b"(" * 118 + ARRAY[128:], "EOF in multi-line statement"),
        (ARCHIVE, "an archive of arrays"),
        (ARCHIVE[:-30], "an archive of arrays"),
    ],
    ids=["text", "empty", "pickle", "objects", "cut", "header", "archive", "archive-cut"],
)
@pytest.mark.parametrize("which", ["images", "labels"])
def test_a_file_that_is_no_array_is_named(content, why, which, files, tmp_path):
    source = files(np.zeros((5, 4, 4)), np.zeros(5, int))
    (tmp_path / f"{which}.npy").write_bytes(content)
    message = f"{which}.npy: not an array of numbers .*{why}.*; expected one.* Save the images"
    with pytest.raises(UserError, match=message):
        source.pictures()
