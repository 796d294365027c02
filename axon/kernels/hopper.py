"""Hopper GPUs, for which the Mosaic GPU kernels are; known without importing Pallas."""

import jax

CHIPS = ("H100", "H200", "GH200", "H800", "H20")
"""GPUs of compute capability 9.0, as `jax.Device.device_kind` names them."""


def is_hopper(chip: str) -> bool:
    """Whether a `jax.Device.device_kind` is one of `CHIPS`."""
    return bool(set(CHIPS) & set(chip.replace("-", " ").split()))


def unsupported(chip: str) -> str | None:
    """Why no kernel for Hopper GPUs can run on a chip; None if they can."""
    if not is_hopper(chip):
        return f"it is for Hopper GPUs, and this is {chip}"
    if jax.__version_info__ < (0, 11):
        return f"it needs jax 0.11, and this is {jax.__version__}"
    return None
