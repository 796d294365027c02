"""A machine by name: so many chips of a kind, and how they are linked."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from axon.chips.chip import Chip
from axon.errors import UserError, suggest

CORES_AS_DEVICES = {"tpu7x": 2}
"""Chips of which JAX shows each of so many cores as a device."""

_NAME = re.compile(r"(?:(\d+)\*)?([^:*]+)(?::(\d+(?:x\d+)*))?")


@dataclass(frozen=True)
class Target:
    """A machine to plan for, which need not be here.

    Args:
        name: as it was written. chip: of all its devices. shape: of a slice of TPUs the chips along each dimension; of
            GPUs the hosts, and the GPUs of each. slices: how many such slices a network links.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def of(cls, name: str, known: dict[str, Chip]) -> "Target":
        """The machine called `name`: `v5p:4x4x4`, `2*v5e:16x16` of two slices, `h100:64`, `h100:16x8` with the hosts.

        Raises `UserError` for a chip that is not `known`, a shape that it cannot have, or links that are not known.
        """
        parts = _NAME.fullmatch(name.strip())
        kind = parts[2] if parts else name.partition(":")[0]
        if kind not in known:
            raise UserError(f"target {name!r} (--on): no chip is called {kind!r}.{suggest(kind, known)}")
        chip = known[kind]
        sizes = tuple(map(int, parts[3].split("x"))) if parts and parts[3] else ()
        example = "x".join("4" * chip.torus) if chip.torus else "16x8"
        most = chip.torus or 2
        if not sizes or 0 in sizes or len(sizes) > most or (chip.torus and len(sizes) < most):
            what = f"its {most} dimensions" if chip.torus else "the number of GPUs, or of hosts and of GPUs of each"
            raise UserError(f"target {name!r} (--on): write {what}, as {kind}:{example}")
        made = cls(name, chip, sizes if chip.torus else _hosts(name, chip, sizes), int(parts[1] or 1) if parts else 1)
        if made.slices == 0 or (made.slices > 1 and not chip.torus):
            raise UserError(f"target {name!r} (--on): '{made.slices}*' is for slices of TPUs, at least one of them")
        if made.devices > 1 and chip.link is None:
            raise UserError(
                f"target {name!r} (--on): nothing is known of the links of {kind}: plan for one device, {kind}:1, or "
                "give its value of axon/chips a `link` and a `network`, in bytes/s"
            )
        return made

    @cached_property
    def devices(self) -> int:
        """How many devices JAX shows."""
        return math.prod(self.shape) * self.slices * CORES_AS_DEVICES.get(self.chip.name, 1)

    @property
    def platform(self) -> str:
        return "tpu" if self.chip.torus else "cpu" if self.chip.name == "cpu" else "gpu"

    @property
    def linked(self) -> int:
        """How many devices the fast links join: those of a slice, or of a host."""
        return self.devices // self.slices if self.chip.torus else min(self.shape[-1], self.devices)

    def doubled(self) -> "Target":
        """The target with twice as many chips: along a torus' last shortest dimension, or in twice as many hosts."""
        chip, shape = self.chip, list(self.shape)
        by_hosts = 0 if shape[-1] == chip.host else 1
        place = len(shape) - 1 - shape[::-1].index(min(shape)) if chip.torus else by_hosts
        shape[place] *= 2
        return _named(chip, shape, self.slices)

    def between(self, larger: "Target") -> list["Target"]:
        """Machines between this one and `larger`, which has twice as many chips along one dimension or in hosts, the
        smallest first, 7 at most; of a torus of three dimensions those that are multiples of 4."""
        place = next(n for n, (own, more) in enumerate(zip(self.shape, larger.shape, strict=True)) if own != more)
        chip, own = self.chip, self.shape[place]
        step = max(1 if not chip.torus else 4, own // 8)
        if (chip.torus and (chip.torus < 3 or own % 4)) or (not chip.torus and place):
            return []  # of a slice of two dimensions sides are powers of two, as are the GPUs of a host
        counts = range(own + step, larger.shape[place], step)
        return [_named(chip, (*self.shape[:place], n, *self.shape[place + 1 :]), self.slices) for n in counts]

    def of_chip(self, chip: Chip) -> "Target | None":
        """A machine of as many devices of another chip, if there is one: hosts that are full, or a slice whose sides
        are powers of two."""
        if not chip.torus:
            gpus = min(self.devices, chip.host)
            return None if self.devices % gpus else _named(chip, (self.devices // gpus, gpus), 1)
        one = _named(chip, (1,) * chip.torus, 1)
        while one.devices < self.devices:
            one = one.doubled()
        return one if one.devices == self.devices else None

    def resized(self, devices: int) -> "Target":
        """The machine with so many devices: of TPUs a part of a slice, halved along its longest dimension again and
        again, or several such slices; of GPUs as many hosts.

        Raises `UserError` for a number that is none of these.
        """
        if not self.chip.torus:
            gpus = min(devices, self.shape[-1])
            if devices % gpus:
                raise UserError(f"{devices} GPUs do not fill hosts of {gpus}, as {self.name} has")
            return _named(self.chip, (devices // gpus, gpus), 1)
        if devices % self.linked == 0:
            return _named(self.chip, self.shape, devices // self.linked)
        one = _named(self.chip, self.shape, 1)
        while one.devices > devices and max(one.shape) % 2 == 0:
            shape = list(one.shape)
            shape[shape.index(max(shape))] //= 2
            one = _named(self.chip, shape, 1)
        if one.devices != devices:
            raise UserError(f"{devices} devices are no halves of a slice of {self.name}, nor several slices")
        return one


def _named(chip: Chip, shape: Sequence[int], slices: int) -> Target:
    several = f"{slices}*" * (slices > 1)
    return Target(f"{several}{chip.name}:{'x'.join(map(str, shape))}", chip, tuple(shape), slices)


def _hosts(name: str, chip: Chip, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Hosts, and the GPUs of each."""
    if len(sizes) == 2:
        hosts, gpus = sizes
        if gpus > chip.host:
            raise UserError(f"target {name!r} (--on): a host of {chip.name} has {chip.host} GPUs, not {gpus}")
        return hosts, gpus
    (count,) = sizes
    if count > chip.host and count % chip.host:
        raise UserError(
            f"target {name!r} (--on): {count} GPUs do not fill hosts of {chip.host}: write a multiple of {chip.host}"
        )
    return max(1, count // chip.host), min(count, chip.host)
