"""Where JAX's persistent cache of compiled programs is left out."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def leave_out_cached_programs(devices: Sequence[Any]) -> None:
    """Turn the persistent cache off from here on, if these are several CPU devices.

    A program that XLA's CPU runtime loads from the cache no longer orders the collectives in a loop with independent
    ones outside of it. Devices then take them in different orders, and wait for each other for ever: with jaxlib
    0.12.0.1 an update of pipelined experts ran 4 times of 4 when compiled anew, and 0 times of 3 when loaded.
    """
    several = len(devices) > 1 and devices[0].platform == "cpu"
    if several and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # whether it is used is asked once
