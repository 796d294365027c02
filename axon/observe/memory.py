"""How much memory this process and its first device use."""

from pathlib import Path
from typing import Any

import jax

_STATUS = Path("/proc/self/status")


def memory_use() -> dict[str, int]:
    """Bytes: `host` and `host_peak` of this process; `device`, `device_peak` and `device_limit` where the device has
    memory of its own and says."""
    return _of_host() | _of_device(jax.local_devices()[0])


def _of_host() -> dict[str, int]:
    if not _STATUS.is_file():
        return {}
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    found = {"host": lines.get("VmRSS"), "host_peak": lines.get("VmHWM")}
    return {name: 1024 * int(text.split()[0]) for name, text in found.items() if text}


def _of_device(device: Any) -> dict[str, int]:
    stats = device.memory_stats() or {}
    names = {"device": "bytes_in_use", "device_peak": "peak_bytes_in_use", "device_limit": "bytes_limit"}
    return {ours: stats[theirs] for ours, theirs in names.items() if theirs in stats}
