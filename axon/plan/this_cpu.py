"""The machine's own CPU as a chip to plan for: measured, as no table has it."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axon.chips.chip import Chip
from axon.launch.host import free_memory

CPU = "cpu"
SIDE, NUMBERS, TRIES = 1024, 2**23, 5
"""Of the matrices that are multiplied, of the array that is copied, and how often each."""


def this_cpu(devices: int) -> Chip:
    """What each of `devices` devices has that share the cores and the memory of this machine.

    Its peak is the rate of a product of float32 matrices, its bandwidth that of a copy, which is also what a device
    sends to another with.
    """
    with jax.default_device(jax.devices(CPU)[0]):
        product = _fastest(jax.jit(lambda x: x @ x), jnp.ones((SIDE, SIDE)))
        copy = _fastest(jax.jit(lambda x: x + 1), jnp.ones(NUMBERS))
    peak, bandwidth = 2 * SIDE**3 / product / devices, 8 * NUMBERS / copy / devices
    memory = (free_memory() or 0) // devices
    return Chip(CPU, (CPU,), peak, memory, bandwidth, link=bandwidth, host=devices)


def _fastest(function: Callable[[Any], Any], argument: Any) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(function(argument))
    best = math.inf
    for _ in range(TRIES):
        begun = time.perf_counter()
        jax.block_until_ready(function(argument))
        best = min(best, time.perf_counter() - begun)
    return best
