"""A layout on real devices: the mesh, and the sharding of any array whose axes are named."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from axon.axes.array_spec import ArraySpec
from axon.axes.memory import HOST
from axon.axes.patterns import Names, base
from axon.chips import V4, chip_of
from axon.errors import suggest
from axon.layout.table import KINDS, KV, ULYSSES, Layout, LayoutError
from axon.layout.zigzag import zigzag

DEVICES = "devices"
"""The named axis with one element for each device of the mesh."""


@dataclass(frozen=True, eq=False)
class Placement:
    """A `Layout` whose mesh has been built over devices, or over an abstract topology.

    Specs leave out mesh axes of size 1, and those that are manual in the current context. `assumed` is the platform
    of a mesh without devices; `method` that of `Layout.context` in the block being traced, where it has several. `host`
    and `disk` are an `Execution`'s: the kinds of array that are stored there.
    """

    layout: Layout
    mesh: Mesh | AbstractMesh
    assumed: str = "cpu"
    method: str | None = None
    host: tuple[str, ...] = ()
    disk: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, devices: Sequence[Any] | None = None) -> "Placement":
        """Build the mesh of `layout` over `devices` (by default `first_devices`), or raise `LayoutError`."""
        devices = first_devices(layout) if devices is None else devices
        sizes = mesh_sizes(layout, len(devices))
        kind = AxisType.Auto if layout.auto else AxisType.Explicit
        grid = _arranged(devices, tuple(sizes.values()))
        return cls(layout, Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes)))

    @classmethod
    def described(cls, layout: Layout, count: int, platform: str = "cpu") -> "Placement":
        """The placement on a mesh of devices that need not exist: to trace programs without arrays.

        A size of -1 in the mesh is inferred from `count` devices; a mesh without one is used as it is.
        """
        if -1 not in layout.mesh.values():
            count = math.prod(layout.mesh.values())
        sizes = mesh_sizes(layout, count)
        kind = AxisType.Auto if layout.auto else AxisType.Explicit
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
        return cls(layout, mesh, platform)

    @property
    def overlap(self) -> Names:
        return self.layout.overlap + ((KV,) if "tensor" in self.layout.overlap else ())

    @property
    def explicit(self) -> bool:
        return not self.layout.auto

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: of the mesh's devices, not of the machine that traces."""
        platform = str(self.devices[0].platform) if self.devices else self.assumed
        return "gpu" if platform in ("cuda", "rocm") else platform

    @property
    def chip(self) -> str:
        """The mesh's `jax.Device.device_kind`; empty on an abstract mesh."""
        return str(self.devices[0].device_kind) if self.devices else ""

    @property
    def splits_tiled_scatters(self) -> bool:
        """As of `axon.chips.Chip`; False for a chip that is not known."""
        chip = chip_of(self.chip)
        return chip is not None and chip.splits_tiled_scatters

    @property
    def devices(self) -> list[Any]:
        """The mesh's devices, in its order; none on an abstract mesh."""
        return list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else []

    @property
    def memories(self) -> frozenset[str]:
        """The kinds of memory that devices say they can use; none for those that only describe a GPU."""
        return frozenset(memory.kind for device in self.devices[:1] for memory in device.addressable_memories())

    @property
    def has_host_memory(self) -> bool:
        """Whether the devices can use their host's memory, `pinned_host`; where they do not say, they can."""
        return not self.memories or HOST in self.memories

    def torus_ring_size(self, mesh_axes: Names) -> int:
        """How many of the devices along `mesh_axes`, from the mesh's first on, lie along one dimension of a whole
        three-dimensional torus; 1 where all of them lie in a plane, and where there is no such torus.

        A chip's two cores (tpu7x) lie along a dimension of their own. See `axon.axes.placing`.
        """
        if self._torus is None:
            return 1
        names = [name for name in self.mesh.axis_names if name in mesh_axes]
        along = self._torus[tuple(slice(None) if name in names else 0 for name in self.mesh.axis_names)]
        places = along.transpose(*(names.index(name) for name in mesh_axes), -1).reshape(-1, along.shape[-1])
        if np.ptp(places[:, :3], axis=0).min() == 0:
            return 1
        other = places[:, places[0] == places[1]]
        return int(np.argmax(np.any(other != other[0], axis=1)))

    @cached_property
    def _torus(self) -> np.ndarray | None:
        """Where each device of the mesh lies in a three-dimensional torus with links around, and which of its chip's
        cores it is; None where there is none."""
        chip = chip_of(self.chip)
        if chip is None or chip.torus != 3:
            return None
        places = np.array([(*device.coords, device.core_on_chip) for device in self.devices])
        if np.ptp(places[:, :3], axis=0).min() < 3:  # shorter dimensions have no wrap-around link
            return None
        return places.reshape(*self.mesh.axis_sizes, -1)

    @cached_property
    def tables(self) -> Mapping[str, dict[str, Names]]:
        return {kind: self.layout.table(kind, self.method) for kind in KINDS}

    def mesh_axes(self, name: str, kind: str = "activations") -> Names:
        """The mesh axes that split `name`, but for manual ones and those of size 1."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(a for a in self.row(name, kind) if self.mesh.shape.get(a, 1) > 1 and a not in manual)

    def row(self, name: str, kind: str = "activations") -> Names:
        """The table's row for `name`; for a role without a row, as `seq.residual`, that of its axis `seq`.

        Two kinds of name need no row: `_…` is never split, and `devices` has one element for each device of the mesh.
        """
        if name.startswith("_"):
            return ()
        if name == DEVICES:
            return tuple(self.mesh.axis_names)
        table = self.tables[kind]
        found = table.get(name, table.get(base(name)))
        if found is None:
            raise LayoutError(
                f"axis {name!r} is not in the layout's table.{suggest(name, table)} "
                f"Give it a row: Layout.rows = {{{name!r}: None}} leaves it unsplit"
            )
        return found

    @property
    def context(self) -> str | None:
        """As `Layout.context`, of the block being traced; None: keys and values are gathered."""
        return self.method if isinstance(self.layout.context, Mapping) else self.layout.context

    def in_block(self, kind: str) -> "Placement":
        """The placement in a block of this kind."""
        context = self.layout.context
        return replace(self, method=context.get(kind)) if isinstance(context, Mapping) else self

    @property
    def ring(self) -> Names:
        """The mesh axes over which a sequence is stored zig-zag, for the longest ring of any block; or none."""
        for method in ("ring", "usp"):
            if method in self.layout.contexts:
                return replace(self, method=method).mesh_axes("seq.attention")
        return ()

    def stored_positions(self, seq: int) -> np.ndarray:
        """The positions of a sequence in the order in which arrays `batch seq` have them: see `axon.layout.zigzag`."""
        size = math.prod(self.mesh.shape[a] for a in self.ring)
        return zigzag(size, seq) if size > 1 else np.arange(seq)

    def spec(self, names: Names, kind: str = "activations") -> PartitionSpec:
        """The `PartitionSpec` of an array with these axes."""
        check_once(names, [self.row(n, kind) for n in names], f"an array with axes {' '.join(names)!r}")
        split = [self.mesh_axes(n, kind) for n in names]
        return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in split))

    def sharding(self, names: Names, kind: str = "activations") -> NamedSharding:
        """The sharding of an array with these axes, and the memory it is stored in."""
        memory = HOST if self.on_host(names, kind) else None
        return NamedSharding(self.mesh, self.spec(names, kind), memory_kind=memory)

    def on_host(self, names: Names, kind: str) -> bool:
        """Whether the host's memory stores an array with these axes: one of a kind in `host`, and no scalar."""
        return kind in self.host and bool(names)

    def on_disk(self, names: Names, kind: str) -> bool:
        """Whether files store an array with these axes: one of a kind in `disk`, and no scalar."""
        return kind in self.disk and bool(names)

    def bytes_per_device(self, spec: ArraySpec) -> int:
        """Bytes of each device's shard."""
        return spec.nbytes // math.prod(self.num_shards(name, spec.kind) for name in spec.axes)

    @property
    def stages(self) -> int:
        """How many devices `layers` are split over: the stages of a pipeline."""
        return max(self.num_shards("layers", kind) for kind in KINDS)

    def stored_layers(self, count: int) -> int:
        """How many layers are stored for `count` of them: with `Layout.pad_layers` the same number on every stage."""
        return -(-count // self.stages) * self.stages if self.layout.pad_layers else count

    def num_shards(self, name: str, kind: str = "activations") -> int:
        """How many shards `name` is split into."""
        return math.prod(self.mesh.shape.get(a, 1) for a in self.row(name, kind))


def first_devices(layout: Layout) -> list[Any]:
    """The first devices that there are, as many as the mesh of `layout` has; all, where it takes all or has more.

    Of several processes each has as many; all devices are returned where that cannot be.
    """
    devices, sizes = jax.devices(), layout.mesh.values()
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    each, rest = divmod(math.prod(sizes), len(by_process))
    if -1 in sizes or rest or each > min(map(len, by_process.values())):
        return devices
    return [device for index in sorted(by_process) for device in by_process[index][:each]]


def check_once(names: Names, rows: Sequence[Names], where: str) -> None:
    """Raise `LayoutError` if one mesh axis would split two axes of one array."""
    owner: dict[str, str] = {}
    for name, row in zip(names, rows, strict=True):
        for axis in row:
            if axis in owner:
                raise LayoutError(
                    f"{where} would be split twice over mesh axis {axis!r}: by {owner[axis]!r} and by {name!r}. "
                    f"Take {axis!r} out of the row of one of the two, as in Layout.rows = {{{name!r}: None}}"
                )
            owner[axis] = name


def mesh_sizes(layout: Layout, count: int) -> dict[str, int]:
    """The mesh's sizes for `count` devices, in the layout's order, a size of -1 inferred."""
    known = math.prod(size for size in layout.mesh.values() if size != -1)
    rest = count // known if count % known == 0 else 0
    sizes = {a: layout.mesh[a] for a in layout.order if a in layout.mesh} or {"data": 1}
    asked = " × ".join(f"{a} {n}" for a, n in sizes.items())
    if -1 in sizes.values():
        if not rest:
            raise LayoutError(
                f"Layout.mesh asks for {asked}, and {count} devices are not divisible by {known}. Write a size for -1: "
                "a mesh of fewer devices than there are takes the first"
            )
        return _divided({a: rest if n == -1 else n for a, n in sizes.items()}, layout)
    if known != count:
        raise LayoutError(
            f"Layout.mesh asks for {asked} = {known} devices, and there are {count}. Change the sizes, or write -1 for "
            f"one of them; on CPU, XLA_FLAGS=--xla_force_host_platform_device_count={known} gives {known} devices"
        )
    return _divided(sizes, layout)


def _divided(sizes: dict[str, int], layout: Layout) -> dict[str, int]:
    """The mesh with those mesh axes that the layout makes two of."""
    sizes = _with_kv(sizes, layout.replicate_kv)
    return _with_ulysses(sizes) if layout.context == "usp" and sizes.get(ULYSSES, 1) == 1 else sizes


def _with_ulysses(sizes: dict[str, int]) -> dict[str, int]:
    """The mesh with `context` split into a ring and a mesh axis `ulysses` as long, or shorter."""
    context = sizes.get("context", 1)
    exchanged = max(n for n in range(1, math.isqrt(context) + 1) if context % n == 0)
    return _split(sizes, "context", ULYSSES, exchanged)


def _split(sizes: dict[str, int], axis: str, new: str, size: int) -> dict[str, int]:
    """The mesh with a mesh axis `new`, of `size`, that takes so much of `axis` and comes after it."""
    parts = [{a: n // size, new: size} if a == axis else {a: n} for a, n in sizes.items() if a != new]
    return {a: n for part in parts for a, n in part.items()}


def _with_kv(sizes: dict[str, int], copies: int) -> dict[str, int]:
    """The mesh with `tensor` split into `tensor` / `copies` and a mesh axis of `copies` devices."""
    if copies == 1:
        return sizes
    tensor = sizes.get("tensor", 1)
    if tensor % copies:
        raise LayoutError(f"Layout.replicate_kv = {copies} does not divide the mesh axis 'tensor' = {tensor}")
    return _split(sizes, "tensor", KV, copies)


def _arranged(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Devices as a grid in which neighbours along the last axes have the fastest links."""
    cores_of_v4 = devices[0].device_kind in V4.kinds and any(device.core_on_chip for device in devices)
    if devices[0].platform != "tpu" or cores_of_v4:  # libtpu describes each core of a v4, of which JAX knows no grid
        return np.asarray(devices).reshape(shape)
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
