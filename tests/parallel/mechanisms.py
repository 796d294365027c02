"""Each mechanism of parallelism as what it adds to a layout, and which of them go together."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from axon.layout import Layout, sequence_parallel, tensor_3d
from axon.parallel.pipeline import Interleaved

DEVICES = 8
X, Y, Z = "x", "y", "z"
ORDER = ("replica", "pipe", "data", "expert", Z, X, Y, "context", "ulysses", "tensor")
FIELDS_3D = tensor_3d(rows=Z, inputs=X, outputs=Y)
ROWS_3D = FIELDS_3D["rows"] | {"batch": ("replica", "data", "expert", Z)}


@dataclass(frozen=True)
class HostLayout(Layout):
    """A layout of which these kinds of array are on the host, as of `Execution`."""

    host: tuple[str, ...] = ()


# Sizes of mesh axes are the least that a mechanism needs.
DENSE: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data": 2}},
    "replica": {"mesh": {"replica": 2, "data": 2}, "zero": 3},
    "zero 1": {"mesh": {"data": 2}, "zero": 1},
    "zero 2": {"mesh": {"data": 2}, "zero": 2},
    "zero 3": {"mesh": {"data": 2}, "zero": 3},
    "microbatches": {"microbatches": 2},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"tensor": 2}, "rows": sequence_parallel()},
    "overlap": {"mesh": {"tensor": 2}, "rows": sequence_parallel(), "overlap": ("tensor",)},
    "copies of kv_heads": {"mesh": {"tensor": 4}, "replicate_kv": 2},
    "three-dimensional": {"mesh": {X: 2, Y: 2}, "rows": ROWS_3D, "params": FIELDS_3D["params"]},
    "context": {"mesh": {"context": 2}, "context": "gather"},
    "ring": {"mesh": {"context": 2}, "context": "ring"},
    "ulysses": {"mesh": {"context": 2}, "context": "ulysses"},
    "usp": {"mesh": {"context": 2, "ulysses": 2}, "context": "usp"},
    "pipeline": {"mesh": {"pipe": 2}, "microbatches": 4},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "expert": {"mesh": {"expert": 2}},
    "folded": {
        "mesh": {"expert": 2, "tensor": 2},
        "rows": {"seq.expert": ("context", "ulysses", "tensor")},
        "params": {"experts": ("expert", "tensor"), "mlp.expert": None},
    },
}
FURTHER: dict[str, dict[str, Any]] = {  # in compositions alone
    "interleaved": {"mesh": {"pipe": 2}, "microbatches": 4, "schedule": Interleaved(2), "pad_layers": True},
    "folded by tensor": {
        "mesh": {"tensor": 2},
        "rows": {"seq.expert": ("context", "ulysses", "tensor")},
        "params": {"experts": ("expert", "tensor"), "mlp.expert": None},
    },
    "padded layers": {"pad_layers": True},
    "auto": {"auto": True},
    "on the host": {"host": ("params", "optimizer")},
}
EVERY = DENSE | OF_EXPERTS | FURTHER
UNLIKE = {  # two ways to split the same axes
    frozenset({"three-dimensional", other})
    for other in ("tensor", "sequence", "overlap", "copies of kv_heads", "folded")
} | {frozenset(two) for two in itertools.combinations(("context", "ring", "ulysses", "usp"), 2)}


def pairs(mechanisms: Iterable[str]) -> list[tuple[str, ...]]:
    """Those of two that one layout can have."""
    return [
        pair
        for pair in itertools.combinations(mechanisms, 2)
        if frozenset(pair) not in UNLIKE and not all(name.startswith("zero") for name in pair)
    ]


def combined(*names: str, **more: Any) -> Layout:
    """The layout with all these mechanisms, each mesh axis as small as leaves them all."""
    mesh: dict[str, int] = {}
    fields: dict[str, Any] = {"order": ORDER}
    for one in (EVERY[name] for name in names):
        mesh |= {axis: max(size, mesh.get(axis, 1)) for axis, size in one.get("mesh", {}).items()}
        for field, value in one.items():
            if field != "mesh":
                fields[field] = {**fields.get(field, {}), **value} if isinstance(value, dict) else value
    if mesh == {X: 2, Y: 2}:
        mesh[Z] = 2
    if math.prod(mesh.values()) > DEVICES and mesh.get("tensor", 1) > 2:
        mesh["tensor"] = 2
    return HostLayout(mesh or {"data": 1}, **fields | more)


def joined(names: Iterable[str]) -> str:
    return " + ".join(names)


def described(layout: Layout) -> str:
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    mode = "auto" if layout.auto else "explicit"
    host = ", on the host" * (isinstance(layout, HostLayout) and bool(layout.host))
    return f"{mesh}, zero {layout.zero}, {mode}, microbatches {layout.microbatches}, {dict(layout.rows)}{host}"
