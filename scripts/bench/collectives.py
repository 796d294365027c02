"""`axon bench collectives`: seconds of collectives over the devices here, and the links that they say.

Each program repeats its collective, as nccl-tests do, so that the time to start it is not counted as latency.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axon.axes.memory import HOST
from axon.chips import chips, known
from axon.chips.target import Target
from axon.errors import UserError
from axon.launch.cluster import Process
from axon.plan.predict.links import Bandwidths
from axon.plan.this_cpu import CPU, this_cpu
from scripts.bench.fit_links import Scope, Timing, fit
from scripts.bench.timing import alternate, progress

SIZES = tuple(2**power for power in range(10, 29, 3))
"""Bytes of the array: 1 KiB to 256 MiB."""

CPU_SIZES = SIZES[:5]
TIMES = 10
"""How often a program repeats its collective."""

COPIED = 2**28
"""Bytes that each device copies to its host and back."""


def run(sizes: Sequence[int] = (), rounds: int = 5) -> dict[str, Any]:
    """`timings`: of each collective, scope and size; `links`: what `axon plan --links` takes; `machine`.

    Raises `UserError` where there is one device alone.
    """
    _join()
    devices = jax.devices()
    if len(devices) == 1:
        raise UserError(
            "axon bench collectives measures links between devices, and this process has one; start it on several, or "
            "try it on a CPU's: XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    target = _target(devices)
    sizes = sizes or (CPU_SIZES if target.platform == CPU else SIZES)
    timings = [one for scope in scopes(target) for one in _measured(scope, devices, sizes, rounds)]
    links = fit(timings, target) | _host(devices, rounds)
    return {
        "machine": target.name,
        "links": links,
        "timings": list(_rows(timings, target, replace(Bandwidths.of(target), **links))),
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    lines = [("machine", result["machine"]), _HEADING]
    for one in result["timings"]:
        what = f"{one['scope']} {one['devices']}: {one['collective']}, {_kib(one['size'])}, sends {_kib(one['sent'])}"
        measured, table, fitted = (f"{1e6 * one[name]:,.0f}" for name in ("seconds", "predicted", "predicted_by_fit"))
        bandwidths = f"{one['algorithm_bandwidth'] / 1e9:.3f}, {one['bus_bandwidth'] / 1e9:.3f}"
        lines.append((what, f"{measured} ({table}, {fitted}); {bandwidths}"))
    rates = {name: f"{value / 1e9:.3f} GB/s" for name, value in result["links"].items() if "latency" not in name}
    times = {name: f"{1e6 * value:.1f} µs" for name, value in result["links"].items() if "latency" in name}
    return [*lines, *(rates | times).items()]


_HEADING = ("groups of devices, collective", "µs (predicted, by the fit); algorithm, bus GB/s")


def _kib(size: float) -> str:
    return f"{size / 2**10:,.4g} KiB" if size < 2**20 else f"{size / 2**20:,.4g} MiB"


def scopes(target: Target) -> Iterator[Scope]:
    """The groups that are measured: within what fast links join; of several such also across, and the whole."""
    near, far = target.linked, target.devices // target.linked
    mesh = {"far": far, "near": near}
    if near > 1:
        yield Scope("within", mesh, "near")
    if far > 1:
        yield Scope("across", mesh, "far")
    if min(near, far) > 1:
        yield Scope("whole", {"whole": target.devices}, "whole")


def _rows(timings: Sequence[Timing], target: Target, fitted: Bandwidths) -> Iterator[dict[str, Any]]:
    """Each timing as JSON, beside what is predicted by the table of chips and by what was fitted."""
    for one in timings:
        yield {
            "collective": one.collective,
            "scope": one.scope.name,
            "devices": one.scope.devices,
            "size": one.size,
            "seconds": one.seconds,
            "sent": one.sent,
            "algorithm_bandwidth": one.algorithm_bandwidth,
            "bus_bandwidth": one.bus_bandwidth,
            "predicted": one.predicted(target, Bandwidths.of(target)),
            "predicted_by_fit": one.predicted(target, fitted),
        }


# ---- the machine -------------------------------------------------------------------------------------------------


def _join() -> None:
    """Join the other processes, where this is one of several."""
    process = Process.found(os.environ)
    if process is not None and not jax.distributed.is_initialized():
        process.join()


def _target(devices: Sequence[Any]) -> Target:
    """The machine that these devices are."""
    count, hosts = len(devices), len({one.process_index for one in devices})
    if devices[0].platform == CPU:
        near = count // hosts
        return Target(f"{CPU}:{hosts}x{near}", this_cpu(near), (hosts, near))
    chip = known(devices[0].device_kind)
    if not chip.torus:
        return Target.of(f"{chip.name}:{hosts}x{count // hosts}", dict(chips()))
    slices = len({one.slice_index for one in devices})
    sides = np.array([one.coords for one in devices])[:, : chip.torus]
    shape = "x".join(map(str, np.ptp(sides, axis=0) + 1))
    return Target.of(f"{slices}*{chip.name}:{shape}", dict(chips()))


# ---- what is measured --------------------------------------------------------------------------------------------


def _measured(scope: Scope, devices: Sequence[Any], sizes: Sequence[int], rounds: int) -> Iterator[Timing]:
    """The median seconds of each collective at each size, the collectives in turn."""
    mesh = Mesh(np.array(devices).reshape(tuple(scope.mesh.values())), tuple(scope.mesh))
    for size in sizes:
        numbers = max(1, size // (4 * scope.devices)) * scope.devices
        progress(f"{scope.name}: {4 * numbers:,} bytes")
        programs = {name: _program(body, mesh, scope.axis, numbers) for name, body in _BODIES.items()}
        for name, seconds in alternate(programs, rounds).items():
            yield Timing(scope, name, 4 * numbers, float(np.median(seconds)) / TIMES)


def _program(body: Callable[[str, Array], Array], mesh: Mesh, axis: str, numbers: int) -> Callable[[], object]:
    """A compiled program that does a collective `TIMES` times, each of what the one before left."""
    spec = PartitionSpec(mesh.axis_names)

    def repeated(x: Array) -> Array:
        return lax.fori_loop(0, TIMES, lambda _, y: lax.optimization_barrier(body(axis, y)), x)

    shared = jax.jit(jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    make = jax.jit(partial(jnp.zeros, mesh.size * numbers, np.float32), out_shardings=NamedSharding(mesh, spec))
    operand = make()
    compiled = shared.lower(operand).compile()
    return lambda: jax.block_until_ready(compiled(operand))


def _gather(axis: str, x: Array) -> Array:
    return lax.all_gather(x[: len(x) // lax.axis_size(axis)], axis, tiled=True)


def _scatter(axis: str, x: Array) -> Array:
    return lax.dynamic_update_slice(x, lax.psum_scatter(x, axis, tiled=True), (0,))


def _permute(axis: str, x: Array) -> Array:
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(index, (index + 1) % n) for index in range(n)])


_BODIES: dict[str, Callable[[str, Array], Array]] = {
    "all-gather": _gather,
    "reduce-scatter": _scatter,
    "all-reduce": lambda axis, x: lax.psum(x, axis),
    "all-to-all": lambda axis, x: lax.all_to_all(x, axis, 0, 0, tiled=True),
    "ring permute": _permute,
}
"""Along a mesh axis, of the array on each device and to one of its size."""


def _host(devices: Sequence[Any], rounds: int) -> dict[str, float]:
    """Bytes/s of each device, all at once, to its host's memory or from it, the slower; nothing of a CPU, which has no
    such link."""
    if devices[0].platform == CPU or HOST not in {one.kind for one in devices[0].addressable_memories()}:
        return {}
    mesh = Mesh(np.array(devices), ("devices",))
    near = NamedSharding(mesh, PartitionSpec("devices"))
    far = near.with_memory_kind(HOST)
    there = jax.jit(partial(jnp.zeros, len(devices) * COPIED, np.uint8), out_shardings=near)()
    here = jax.device_put(there, far)
    copies = {"to": (there, far), "from": (here, near)}
    steps = {name: partial(_copy, *copy) for name, copy in copies.items()}
    return {"host": COPIED / max(float(np.median(times)) for times in alternate(steps, rounds).values())}


def _copy(x: Array, sharding: NamedSharding) -> None:
    jax.block_until_ready(jax.device_put(x, sharding))
