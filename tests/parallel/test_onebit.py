"""Means that travel as signs: against plain NumPy, and what error feedback is for."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon.parallel.onebit import chunk_size, compress, compressed_means, decompress

WAYS = 4
SHAPES = [(5, 7), (3,), (64,)]


def signs_of(x):
    """A chunk as plus or minus its mean size; empty for an empty chunk."""
    return np.where(x >= 0, 1, -1) * np.mean(np.abs(x)) if x.size else x


def plain(values, sent, averaged):
    """One exchange of one array, by loops: `values` and `sent` by device, `averaged` by chunk without filling."""
    size = chunk_size(values[0].size, WAYS)
    cuts = [slice(i * size, (i + 1) * size) for i in range(WAYS)]
    wanted = [(v + e).ravel() for v, e in zip(values, sent, strict=True)]
    said = [[signs_of(w[cut]) for cut in cuts] for w in wanted]
    left = [w - np.concatenate(s) for w, s in zip(wanted, said, strict=True)]
    means = [np.mean([s[i] for s in said], axis=0) + averaged[i] for i in range(WAYS)]
    told = [signs_of(m) for m in means]
    kept = [m - t for m, t in zip(means, told, strict=True)]
    return np.concatenate(told).reshape(values[0].shape), [x.reshape(values[0].shape) for x in left], kept


@pytest.fixture(scope="module")
def exchange():
    """exchange(values, sent, averaged): lists of NumPy's arrays with the four devices in front."""
    mesh = jax.make_mesh((WAYS,), ("link",), devices=jax.devices()[:WAYS], axis_types=(jax.sharding.AxisType.Auto,))

    def local(*lists):
        made = compressed_means(*([x[0] for x in one] for one in lists), "link", WAYS)
        return jax.tree.map(lambda x: x[None], made)

    split = PartitionSpec("link")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    return lambda *lists: jax.device_get(run(*lists))


def draw(rng):
    return [rng.normal(size=(WAYS, *shape)).astype(np.float32) for shape in SHAPES]


def nothing():
    sent = [np.zeros((WAYS, *shape), np.float32) for shape in SHAPES]
    return sent, [np.zeros((WAYS, chunk_size(int(np.prod(shape)), WAYS)), np.float32) for shape in SHAPES]


def test_three_exchanges_are_those_of_plain_numpy(exchange, rng):
    sent, averaged = nothing()
    by_hand = [(s, [np.zeros(0)] * WAYS) for s in sent]
    for i, shape in enumerate(SHAPES):
        size, count = chunk_size(int(np.prod(shape)), WAYS), int(np.prod(shape))
        by_hand[i] = (sent[i], [np.zeros(max(0, min(size, count - j * size))) for j in range(WAYS)])
    for _ in range(3):
        values = draw(rng)
        means, sent, averaged = exchange(values, sent, averaged)
        for i, value in enumerate(values):
            mean, left, kept = plain(value, *by_hand[i])
            by_hand[i] = (np.array(left), kept)
            for device in range(WAYS):
                np.testing.assert_allclose(means[i][device], mean, atol=1e-5)
                np.testing.assert_allclose(sent[i][device], left[device], atol=1e-5)
                real = kept[device].size
                np.testing.assert_allclose(averaged[i][device][:real], kept[device], atol=1e-5)
                assert not np.any(averaged[i][device][real:]), "filling has no errors"


def test_with_error_feedback_what_was_not_said_is_said_later(exchange, rng):
    """The sum of all means is the sum of the true means, less the errors that are still held."""
    sent, averaged = nothing()
    told, true = [np.zeros(shape) for shape in SHAPES], [np.zeros(shape) for shape in SHAPES]
    for _ in range(20):
        values = draw(rng)
        means, sent, averaged = exchange(values, sent, averaged)
        told = [t + np.asarray(m[0], np.float64) for t, m in zip(told, means, strict=True)]
        true = [t + v.mean(axis=0, dtype=np.float64) for t, v in zip(true, values, strict=True)]
    for i, shape in enumerate(SHAPES):
        held = np.concatenate(list(np.asarray(averaged[i])))[: int(np.prod(shape))].reshape(shape)
        owed = np.mean(np.asarray(sent[i]), axis=0) + held
        np.testing.assert_allclose(told[i] + owed, true[i], atol=1e-4)


def test_a_message_is_one_bit_a_number_and_the_nearest_multiple_of_its_signs(rng):
    x, real = rng.normal(size=40).astype(np.float32), np.ones(40, bool)
    said = jax.jit(decompress)
    signs, size = jax.jit(compress)(x, real)
    assert (signs.dtype, signs.shape) == (np.uint8, (5,))
    error = np.linalg.norm(x - said(signs, size, real))
    for other in (0.9, 1.1):
        assert np.linalg.norm(x - said(signs, other * size, real)) > error
