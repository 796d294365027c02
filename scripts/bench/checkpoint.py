"""`axon bench checkpoint`: saving and restoring against the disk itself, and what of a save training waits for."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon.checkpoint import Checkpoints, Reader, Store
from axon.checkpoint.checksums import checksums, files_below
from axon.errors import UserError
from scripts.bench.disk import drop_cached
from scripts.bench.timing import progress

DEVICES = 8
ARRAYS = 8
MESHES = {"save": (8, 1), "same": (8, 1), "other": (2, 4)}


def run(megabytes: int = 512, rounds: int = 3, folder: str | None = None) -> dict[str, Any]:
    """Medians of `rounds` rounds, in each of which everything is done once, in turn, in a fresh folder in `folder`.

    MB/s are of the state's `megabytes` of float32, random as weights are. `save` ends when the files are flushed to the
    disk, as `dd` with O_DIRECT does; what is read was first dropped from the page cache. `blocking`: seconds until
    `Store.save` returns; `background`: from then until the save is complete. Memory is in use before anything is timed:
    a virtual machine gets it from its host page by page, which takes longer than what is measured.
    """
    _have_devices()
    values = [np.random.default_rng(n).normal(size=(1024, megabytes * 256 // ARRAYS)) for n in range(ARRAYS)]
    state = {f"w{n}": value.astype(np.float32) for n, value in enumerate(values)}
    placed = jax.block_until_ready(jax.device_put(state, _sharding("save")))
    found = []
    for number in range(rounds):
        progress(f"checkpoint: round {number + 1}")
        with TemporaryDirectory(dir=folder or ".") as where:
            found.append(_round(Path(where), placed, megabytes))
    result: dict[str, Any] = {name: float(np.median([one[name] for one in found])) for name in found[0]}
    result |= {
        "save_ratio": result["save"] / result["dd_write"],
        "restore_ratio": result["restore"] / result["dd_read"],
        "other_mesh_ratio": result["restore"] / result["restore_other_mesh"],
        "blocking_share": result["blocking"] / (result["blocking"] + result["background"]),
    }
    return result | {"megabytes": megabytes, "rounds": rounds, "jax": jax.__version__, "cores": os.cpu_count()}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    speeds = {"dd_write": "dd, direct, writes", "save": "a save, flushed", "dd_read": "dd, direct, reads"}
    speeds |= {"restore": "a restore", "restore_other_mesh": "a restore onto another mesh"}
    return [
        *((what, f"{result[name]:,.0f} MB/s") for name, what in speeds.items()),
        ("save ÷ dd", f"{result['save_ratio']:.2f}"),
        ("restore ÷ dd", f"{result['restore_ratio']:.2f}"),
        ("restore onto another mesh takes, against the same", f"{result['other_mesh_ratio']:.2f}"),
        ("training waits for a save", f"{result['blocking'] * 1e3:,.0f} ms, {result['blocking_share']:.1%} of it"),
        ("checksums made, in the background", f"{result['checksum']:,.0f} MB/s"),
        ("checksums compared, by themselves", f"{result['verify']:,.0f} MB/s"),
        ("bytes on disk ÷ bytes of the state", f"{result['stored']:.3f}"),
    ]


def _round(where: Path, state: Mapping[str, jax.Array], megabytes: int) -> dict[str, float]:
    folder, file, found = where / "checkpoints", where / "dd", {}
    size = sum(value.nbytes for value in state.values()) / 1e6

    def speed(work: Callable[[], Any]) -> float:
        _touch(3 * megabytes * 2**20)
        return size / _seconds(work)

    block = ["bs=1M", f"count={megabytes}"]
    found["dd_write"] = speed(lambda: _dd("if=/dev/zero", f"of={file}", "oflag=direct", *block))
    found["dd_read"] = speed(lambda: _dd(f"if={file}", "of=/dev/null", "iflag=direct", *block))
    file.unlink()
    with Store(folder, Checkpoints()) as store:
        _touch(3 * megabytes * 2**20)
        found["blocking"] = _seconds(lambda: store.save(0, state, {}))
        found["background"] = _seconds(store.wait)
        flushing = _seconds(lambda: _flush(folder))
    found["save"] = size / (found["blocking"] + found["background"] + flushing)
    saved = epath.Path(folder / "0" / "state")
    found["stored"] = sum(path.stat().length for path in files_below(epath.Path(folder))) / size / 1e6
    for name, mesh in {"restore": "same", "restore_other_mesh": "other"}.items():
        drop_cached(folder)
        found[name] = speed(lambda mesh=mesh: _restored(folder, state, mesh))
    found["checksum"] = speed(lambda: checksums(saved, files_below(saved), {}))
    drop_cached(folder)
    found["verify"] = speed(lambda: Reader(folder).damage(0))
    return found


def _restored(folder: Path, state: Mapping[str, jax.Array], mesh: str) -> None:
    sharding = _sharding(mesh)
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in state.items()}
    jax.block_until_ready(Reader(folder).restore(abstract)[0])


def _sharding(name: str) -> NamedSharding:
    mesh = jax.make_mesh(MESHES[name], ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    return NamedSharding(mesh, PartitionSpec("data", "tensor"))


def _have_devices() -> None:
    with suppress(RuntimeError):  # JAX has its devices already
        jax.config.update("jax_num_cpu_devices", DEVICES)
    if len(jax.devices()) < DEVICES:
        raise UserError(f"axon bench checkpoint needs {DEVICES} devices, and JAX has {len(jax.devices())} here")


def _flush(folder: Path) -> None:
    """Writes all files to the disk."""
    for path in files_below(epath.Path(folder)):
        with path.open("rb") as file:
            os.fsync(file)


def _touch(size: int) -> None:
    """Writes to `size` bytes of memory, and frees them."""
    np.ones(size, np.uint8)


def _dd(*arguments: str) -> None:
    done = subprocess.run(["dd", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"axon bench checkpoint: dd {' '.join(arguments)} failed: {done.stderr.splitlines()[0]}")


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
