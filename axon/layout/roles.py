"""The parallelism of each mesh axis, inferred from the layout's table."""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from axon.axes.patterns import Names, base
from axon.layout.placement import Placement
from axon.layout.table import KINDS

MODEL_AXES = ("heads", "kv_heads", "mlp", "vocab", "embed", "head_dim")

EXCHANGED = "heads.attention"
"""The role of heads that positions are exchanged for, in Ulysses."""

EXPERTS = "experts"
"""The axis whose parameters stay where they are stored, and to which tokens are sent."""

ZERO = {"params": "ZeRO-3", "grads": "ZeRO-2", "optimizer": "ZeRO-1"}
"""The first kind of array that a mesh axis splits beyond the kind before it → the ZeRO stage."""

STORED = {
    "params": "stored parameters, gradients and optimizer state",
    "grads": "gradients and optimizer state",
    "optimizer": "optimizer state",
}


def roles(placement: Placement, used: Collection[str]) -> dict[str, list[str]]:
    """Mesh axis → what it does, a line each: `data` → ["data parallelism: batch", "ZeRO-3: embed of …"].

    Args:
        used: the axes that the model names, roles included; rows for others are left out.
    """
    tables = {kind: _effective(placement.tables[kind], used) for kind in KINDS}
    found = {axis: list(_roles(axis, tables)) for axis in placement.mesh.shape}
    sharded = [axis for axis, lines in found.items() if any(line.startswith("ZeRO") for line in lines)]
    if sharded and len(found.get("replica", ())) == 1:
        found["replica"].append(f"copies of what {' and '.join(sharded)} cut (HSDP)")
    return {axis: lines or ["nothing"] for axis, lines in found.items()}


def _roles(axis: str, tables: Mapping[str, Mapping[str, Names]]) -> Iterator[str]:
    split = {kind: [name for name, row in table.items() if axis in row] for kind, table in tables.items()}
    computed = [n for n in split["activations"] if n != EXCHANGED or "heads" not in split["activations"]]
    groups = {
        "data parallelism": [n for n in computed if base(n) == "batch"],
        "context parallelism": [n for n in computed if n in ("seq", "kv_seq", EXCHANGED)],
        "sequence parallelism": [n for n in computed if base(n) == "seq" != n],
        "tensor parallelism": [n for n in computed if base(n) in MODEL_AXES and n != EXCHANGED],
        "expert parallelism": [n for n in split["params"] if n == EXPERTS],
        "pipeline": [n for n in computed if n == "layers"],
    }
    if groups["pipeline"] and groups["tensor parallelism"] == ["vocab"]:
        groups["embedding and head, shared by all stages"] = groups.pop("tensor parallelism")
    groups["also splits"] = [n for n in computed if not any(n in names for names in groups.values())]
    if groups["context parallelism"] and groups["sequence parallelism"]:
        groups["context parallelism"] += groups.pop("sequence parallelism")
    yield from (f"{role}: {' '.join(names)}" for role, names in groups.items() if names)
    for before, kind in pairwise(KINDS):
        known = {*split[before], EXPERTS} if kind == "params" else split[before]
        if more := [name for name in split[kind] if name not in known]:
            yield f"{ZERO[kind]}: {' '.join(more)} of {STORED[kind]}"


def _effective(table: Mapping[str, Names], used: Collection[str]) -> dict[str, Names]:
    """The rows of the axes in `used`; for a role without a row, that of its axis."""
    found = {name if name in table else base(name) for name in used}
    return {name: row for name, row in table.items() if name in found}
