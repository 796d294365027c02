"""Rows and mesh axes of a layout without effect on a model: mistyped names, devices that would do redundant work."""

from collections.abc import Callable, Collection, Iterator

from axon.axes.patterns import Names, base
from axon.errors import suggest
from axon.layout.placement import Placement
from axon.layout.table import DEFAULT_ROWS, KINDS


def without_effect(
    placement: Placement,
    parameters: Collection[str],
    activations: Collection[str],
    axes_used: Callable[[], Collection[str]],
) -> list[str]:
    """The mistakes, a line each.

    Args:
        parameters: the axes of all parameters. activations: some of the axes of other arrays.
        axes_used: all axes that the model names. The model has to be traced for them, so called only where needed.
    """
    if not [*_rows(placement, parameters, activations), *_mesh_axes(placement, parameters, activations)]:
        return []
    activations = {*activations, *axes_used()}
    return [*_rows(placement, parameters, activations), *_mesh_axes(placement, parameters, activations)]


def _rows(placement: Placement, parameters: Collection[str], activations: Collection[str]) -> Iterator[str]:
    """Rows for axes that the model does not have, but for those of the default table."""
    layout = placement.layout
    yield from _unknown("rows", layout.rows, "this model has no axis", {*parameters, *activations})
    for kind, rows in layout.stored_rows.items():
        yield from _unknown(kind, rows, "no parameter has an axis", parameters)


def _unknown(where: str, rows: Collection[str], absence: str, names: Collection[str]) -> Iterator[str]:
    known = {*DEFAULT_ROWS, *names, *map(base, names)}
    for name in rows:
        if name not in known:
            yield f"Layout.{where}: {absence} {name!r}, so its row has no effect.{suggest(name, known)}"


def _mesh_axes(placement: Placement, parameters: Collection[str], activations: Collection[str]) -> Iterator[str]:
    """Mesh axes that split no array."""
    used = {axis for kind in KINDS for name in parameters for axis in _row(placement, name, kind)}
    used |= {axis for name in activations for axis in _row(placement, name, "activations")}
    for axis, size in placement.mesh.shape.items():
        if size > 1 and axis not in used:
            rows = sorted({n for table in placement.tables.values() for n, row in table.items() if axis in row})
            reason = (
                f"its rows are for {', '.join(map(repr, rows))}, which this model does not use"
                if rows
                else "no row names it"
            )
            yield (
                f"mesh axis {axis!r} = {size} is not used: {reason}, so {size} groups of devices would do redundant "
                f"work. Remove it, or give it a row, as in Layout.rows = {{'batch': ('data', {axis!r})}}"
            )


def _row(placement: Placement, name: str, kind: str) -> Names:
    table = placement.tables[kind]
    return table.get(name, table.get(base(name), ()))
