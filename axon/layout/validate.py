"""Whether a layout can hold a model, said before anything is traced."""

import math
from collections.abc import Iterator, Mapping, Sequence

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import base
from axon.errors import suggest
from axon.layout.placement import Placement, check_once
from axon.layout.table import DEFAULT_ROWS, KINDS, LayoutError


def validate(
    placement: Placement, parameters: Mapping[str, ArraySpec], batch: ArraySpec, residual: ArraySpec | None = None
) -> None:
    """Raise one `LayoutError` with everything that is wrong.

    Args:
        parameters: path → axes and shape, stacked axes included.
        batch: the axes and the shape of the *global* batch of tokens; residual: of the stream between blocks.
    """
    microbatches = placement.layout.microbatches
    arrays = {**{f"parameter {path}": spec for path, spec in parameters.items()}, "the batch": batch}
    found = [(problem, where) for where, spec in arrays.items() for problem in _array_problems(placement, spec)]
    known = {problem for problem, _ in found}
    streams = _array_problems(placement, residual, KINDS[:1]) if residual else ()
    found += [(problem, "the residual stream") for problem in streams if problem not in known]
    problems = [_told(problem, [w for p, w in found if p == problem]) for problem in dict.fromkeys(p for p, _ in found)]
    problems += list(_mistyped(placement, {n for spec in arrays.values() for n in spec.axes}))
    problems += list(_batch_problems(placement, batch, microbatches))
    problems += list(_unused(placement, {n for spec in arrays.values() for n in spec.axes}))
    if problems:
        raise LayoutError("\n".join(problems))


def _told(problem: str, where: list[str]) -> str:
    """A problem that several arrays share, said once."""
    others = f" Likewise: {', '.join(w.removeprefix('parameter ') for w in where[1:])}" if len(where) > 1 else ""
    return f"{where[0]}: {problem}.{others}"


def _array_problems(placement: Placement, spec: ArraySpec, kinds: Sequence[str] = KINDS) -> Iterator[str]:
    told: set[str] = set()
    for kind in kinds:
        table = placement.tables[kind]
        unknown = [n for n in spec.axes if n not in table and n.partition(".")[0] not in table]
        if unknown:
            yield f"axis {unknown[0]!r} is not in the layout's table.{suggest(unknown[0], table)}".rstrip(".")
            return
        try:
            check_once(spec.axes, [placement.row(n, kind) for n in spec.axes], "it")
        except LayoutError as error:
            yield str(error)
            return
        for name, problem in _indivisible(placement, spec, kind):
            if name not in told:  # a later kind starts from the rows of the one before it, and from their mistakes
                told.add(name)
                yield problem


def _indivisible(placement: Placement, spec: ArraySpec, kind: str) -> Iterator[tuple[str, str]]:
    """Axis → what is wrong with how it is split."""
    for name, size in zip(spec.axes, spec.shape, strict=True):
        num_shards = placement.num_shards(name, kind)
        over = " × ".join(f"{a!r} = {placement.mesh.shape[a]}" for a in placement.mesh_axes(name, kind))
        if name == "layers" and num_shards > 1:
            yield (
                name,
                f"mesh axis {over} would split 'layers' into stages, and a Depth runs whole on every "
                "device: give those devices to 'data' or 'tensor'",
            )
        elif size % num_shards:
            yield (
                name,
                f"axis {name!r} of size {size} is not divisible by {num_shards}, the devices along mesh axis {over} "
                f"({kind}). Choose a size of {name!r} that {num_shards} divides, another size of the mesh axis, or "
                + _way_out(placement, name, size, kind),
            )


def _way_out(placement: Placement, name: str, size: int, kind: str) -> str:
    """The field of the layout that would make an axis fit."""
    tensor = placement.layout.mesh.get("tensor", 1)
    if base(name) == "kv_heads" and "tensor" in placement.row(name, kind) and 0 < size < tensor:
        return f"Layout.replicate_kv = {tensor // math.gcd(size, tensor)}, so that neighbours share them"
    return f"Layout.{'rows' if kind == 'activations' else kind} = {{{name!r}: None}}"


def _mistyped(placement: Placement, names: set[str]) -> Iterator[str]:
    """Rows for a name that no parameter has and that is nearly one of those there are. (Others may be activations'.)"""
    layout = placement.layout
    known = set(DEFAULT_ROWS) | {base(n) for n in names}
    for where, rows in (("rows", layout.rows), *((kind, getattr(layout, kind)) for kind in KINDS[1:])):
        for name in rows:
            if base(name) not in known and "Did you mean" in (hint := suggest(base(name), known)):
                yield f"Layout.{where}: no array has an axis {name!r}.{hint}"


def _batch_problems(placement: Placement, batch: ArraySpec, microbatches: int) -> Iterator[str]:
    rows = dict(zip(batch.axes, batch.shape, strict=True))["batch"]
    num_shards = placement.num_shards("batch") * microbatches
    if rows % placement.num_shards("batch") == 0 and rows % num_shards:
        yield (
            f"the batch: {rows} sequences are not divisible by {num_shards}, which is "
            f"Layout.microbatches = {microbatches} × {placement.num_shards('batch')} devices along 'batch'"
        )


def _unused(placement: Placement, names: set[str]) -> Iterator[str]:
    used = {axis for kind in KINDS for name in names for axis in _rows(placement, name, kind)}
    for axis, size in placement.mesh.shape.items():
        if size > 1 and axis not in used:
            rows = sorted(n for n, row in placement.tables["activations"].items() if axis in row)
            reason = (
                f"its rows are for {', '.join(map(repr, rows))}, which this model has not"
                if rows
                else "no row names it"
            )
            yield (
                f"mesh axis {axis!r} = {size} is not used: {reason}, so {size} groups of devices would repeat "
                f"one work. Take it out, or give it a row, as in Layout.rows = {{'batch': ('data', {axis!r})}}"
            )


def _rows(placement: Placement, name: str, kind: str) -> Sequence[str]:
    table = placement.tables[kind]
    return table.get(name, table.get(name.partition(".")[0], ()))
