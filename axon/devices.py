"""Which platform JAX is to use, decided before JAX is imported."""

import os
from pathlib import Path


def choose_platform() -> None:
    """Set `JAX_PLATFORMS=cpu` on a machine with no accelerator, unless the person has said something else.

    With the TPU's or CUDA's compiler installed and no chip, JAX would otherwise look for one and print tracebacks.
    """
    nodes = (Path("/dev").glob(pattern) for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd"))
    if not any(True for found in nodes for _ in found):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def cache_compiled_code(folder: Path) -> None:
    """Keep compiled programs in `folder`, unless `JAX_COMPILATION_CACHE_DIR` names another."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
