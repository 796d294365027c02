"""Stochastic rounding: which neighbours, how often, and from which bits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axon.layout import Layout
from axon.precision.stochastic import random_words, rounded_to_bfloat16
from axon.runtime import Runtime
from models.llama import Llama

SHAPE = (64, 48)


def words(seed: int, shape=SHAPE):
    return random_words(jnp.uint32(seed), ("embed", "mlp"), shape, "optimizer")


def test_a_number_becomes_either_neighbour_and_in_the_mean_itself(rng):
    x = rng.normal(size=SHAPE).astype(np.float32)
    made = np.stack([np.float32(rounded_to_bfloat16(x, words(seed))) for seed in range(400)])
    step = np.spacing(np.abs(x)) * 2**16  # of bfloat16, which has 16 bits less
    assert (np.abs(made - x) < step).all()
    assert (np.abs(made.mean(axis=0) - x) < 6 * step / np.sqrt(4 * 400)).mean() > 0.999
    assert abs(((made.mean(axis=0) - x) / step).mean()) < 6 / np.sqrt(4 * 400 * x.size)


def test_what_bfloat16_has_and_what_is_not_finite_stays(rng):
    x = np.float32(jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16))
    x[0, :4] = 0, np.inf, -np.inf, np.nan
    np.testing.assert_array_equal(np.float32(rounded_to_bfloat16(x, words(3))), x)


def test_bits_are_the_same_on_every_layout_and_each_devices_own():
    layout = Layout({"data": 2, "tensor": 2}, zero=1)
    runtime = Runtime(
        Llama(vocab=64, embed=32, layers=1, heads=2, kv_heads=2, mlp=32), layout, devices=jax.devices()[:4]
    )
    seed = jax.device_put(np.uint32(7), NamedSharding(runtime.placement.mesh, PartitionSpec()))
    with runtime.tracing():
        made = runtime.jit(lambda seed: random_words(seed, ("embed", "mlp"), SHAPE, "optimizer"))(seed)
    assert made.sharding.is_equivalent_to(
        NamedSharding(runtime.placement.mesh, runtime.placement.spec(("embed", "mlp"), "optimizer")), 2
    )
    assert made.sharding.shard_shape(SHAPE) == (32, 24)
    np.testing.assert_array_equal(made, words(7))


def test_bits_look_random():
    """Each of the 32 is set half of the time, and as often as not where it is in a neighbour and for the next seed."""
    first, next_seed = np.asarray(words(11)), np.asarray(words(12))
    for other in (np.zeros_like(first), np.roll(first, 1, axis=0), np.roll(first, 1, axis=1), next_seed):
        set_bits = ((first ^ other)[..., None] >> np.arange(32)) & 1
        assert np.abs(set_bits.mean(axis=(0, 1)) - 0.5).max() < 6 * 0.5 / np.sqrt(first.size)
