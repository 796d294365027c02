"""Chips: one value each, all that is known of it in one place. What is not known of a chip is said, never guessed."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from axon.chips.chip import Chip, Option
from axon.chips.gpu import GPUS
from axon.chips.tpu import TPUS, V4, V5E
from axon.errors import UserError

__all__ = [
    "CHIPS",
    "GPUS",
    "KERNEL_CHIPS",
    "TPUS",
    "V4",
    "V5E",
    "Chip",
    "Option",
    "chip_of",
    "chips",
    "known",
    "part",
    "xla_options",
]

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in (*TPUS, *GPUS)}
"""Name → chip."""

KERNEL_CHIPS: Mapping[str, Chip] = {name: CHIPS[name] for name in ("v5e", "v5p", "v6e", "tpu7x")}
"""The TPUs that every kernel is compiled for, and its bundles recorded."""

OWN = "CHIPS"
"""What a module of a person's own calls its chips, a tuple."""

ENTRY_POINTS = "axon.chips"
"""The group of entry points by which an installed package names modules that have chips."""


def chips() -> Mapping[str, Chip]:
    """Name → chip: those here, those of modules that installed packages name, and of those that are imported, as a
    person's own by a config file, which come before the others."""
    return _chips(len(sys.modules))


def chip_of(kind: str) -> Chip | None:
    """The chip that `jax.Device.device_kind` calls `kind`; None where it is not known."""
    return next((chip for chip in reversed([*chips().values()]) if kind in chip.kinds), None)


@cache
def _chips(modules: int) -> Mapping[str, Chip]:
    """`modules`: how many are imported; more may have chips."""
    imported = [module for module in sys.modules.copy().values() if module is not None]
    found = (vars(module).get(OWN) for module in (*_installed(), *imported))
    own = [chip for chips in found if isinstance(chips, tuple) for chip in chips if isinstance(chip, Chip)]
    return {**CHIPS, **{chip.name: chip for chip in own}}


@cache
def _installed() -> tuple[Any, ...]:
    return tuple(one.load() for one in entry_points(group=ENTRY_POINTS))


def known(kind: str) -> Chip:
    """`chip_of`, where the chip is needed. Raises `UserError` for one that is not known."""
    if (chip := chip_of(kind)) is None:
        raise UserError(
            f"nothing is known of the chip {kind!r}: add its value to axon/chips, with where it is from, or to {OWN} "
            "of a module that the config file imports"
        )
    return chip


def part(device: Any) -> float:
    """How much of its chip's value a `jax.Device` is: ½ where JAX shows each of two cores as a device."""
    chip = known(device.device_kind)
    return (getattr(device, "num_cores", None) or chip.cores) / chip.cores if chip in TPUS else 1


def xla_options(devices: Sequence[Any]) -> tuple[tuple[Option, ...], str]:
    """XLA's options for a mesh of these devices, and why there are none; that is empty for a CPU, which needs none."""
    if not devices or devices[0].platform == "cpu":
        return (), ""
    kind = devices[0].device_kind
    if (chip := chip_of(kind)) is None:
        return (), f"none: nothing is known of the chip {kind!r}"
    return chip.options, "" if chip.options else f"none: none have been measured on {kind}"
