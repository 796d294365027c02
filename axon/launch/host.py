"""Which platform JAX is to use, and with what memory and cache, decided before JAX looks for devices."""

import ctypes
import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What the system says of its memory, and where a container's limit stands (control groups 2 and 1)."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""glibc's options: from how much free memory on some is given back (-1: never), and how many arrays may be mappings of
their own, which are given back when freed."""


def choose_platform() -> None:
    """Set `JAX_PLATFORMS=cpu` on a machine with no accelerator, unless the person has said something else.

    With the TPU's or CUDA's compiler installed and no chip, JAX would otherwise look for one and print tracebacks.
    """
    if not has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def has_accelerator() -> bool:
    """Whether this machine has the device node of a GPU or TPU."""
    nodes = (Path("/dev").glob(pattern) for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd"))
    return any(True for found in nodes for _ in found)


def keep_freed_memory() -> None:
    """On a CPU, let every step find the memory of the one before it, which the C library would give back in between.

    A step's temporaries are one array; each of its pages would be asked for, and zeroed by the system, at every step.
    glibc can keep it in its main arena, which is the main thread's: so that is where programs are then run.
    `axon train` calls this, and a script of one's own may; once JAX has made its devices it is of no use.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; other libraries have none
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def cache_compiled_code(folder: Path) -> None:
    """Keep compiled programs in `folder`, unless `JAX_COMPILATION_CACHE_DIR` names another."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def free_memory() -> int | None:
    """Bytes that programs can still take on this machine, swap included, and within its container; None if unknown."""
    if not _MEMINFO.is_file():
        return None
    told = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    free = sum(1024 * int(told[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    limits = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return min([free, *(int(limit) for limit in limits if limit.isdecimal())])
