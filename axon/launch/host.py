"""JAX's platform, memory and compilation cache, chosen before JAX looks for devices."""

import ctypes
import os
import re
from pathlib import Path

_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The system's memory, and the files of a container's limit (control groups 2 and 1)."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""glibc's `mallopt` options: the free memory above which some is returned to the system (-1: never), how many
allocations may be memory mappings of their own, which are returned when freed, and how many arenas threads share."""


def choose_platform() -> None:
    """Set `JAX_PLATFORMS=cpu` on a machine with no accelerator, unless it is set.

    With the TPU's or CUDA's compiler installed and no chip, JAX would otherwise look for one and print tracebacks.
    """
    if not has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def has_accelerator() -> bool:
    """Whether this machine has the device node of a GPU or TPU."""
    nodes = (Path("/dev").glob(pattern) for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd"))
    return any(True for found in nodes for _ in found)


def multiplies_bfloat16() -> bool:
    """Whether this machine's cores have matrix instructions for bfloat16 (AMX), which XLA uses."""
    return _CPUINFO.is_file() and "amx_bf16" in _CPUINFO.read_text().split()


def keep_freed_memory() -> None:
    """On a CPU, let each step reuse the memory of the one before, which the C library would return to the system.

    A step's temporaries are one allocation; otherwise its pages would be requested from the system, and zeroed, at
    every step. glibc can keep it in its main arena only, which is the main thread's, so programs then run in the main
    thread (no asynchronous dispatch). Those of several devices each have a thread: all threads then share the arena, in
    which compiling takes longer. `axon train` calls this, and your own script may: before JAX creates its devices.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; other libraries have none
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
        if _several_devices(jax.config.jax_num_cpu_devices):
            mallopt(_M_ARENA_MAX, 1)


def _several_devices(configured: int) -> bool:
    """Whether JAX will have several CPU devices, by its configuration or XLA's flags."""
    flags = os.environ.get("XLA_FLAGS", "")
    return configured > 1 or bool(re.search(r"--xla_force_host_platform_device_count=(?!1\b)\d", flags))


def cache_compiled_code(folder: Path) -> None:
    """Cache compiled programs in `folder`, unless `JAX_COMPILATION_CACHE_DIR` names another."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def free_memory() -> int | None:
    """Bytes that programs can still allocate on this machine, swap included, and in its container; None if unknown."""
    if not _MEMINFO.is_file():
        return None
    sizes = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    free = sum(1024 * int(sizes[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    limits = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return min([free, *(int(limit) for limit in limits if limit.isdecimal())])
