"""Whether a layout can shard a model, checked before anything is traced."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import Names, base
from axon.errors import suggest
from axon.layout.context import context_problems
from axon.layout.placement import Placement, check_once
from axon.layout.table import DEFAULT_ROWS, KINDS, LayoutError


def validate(
    placement: Placement,
    parameters: Mapping[str, ArraySpec],
    batch: ArraySpec,
    activations: Mapping[str, ArraySpec] = MappingProxyType({}),
    axes_used: Callable[[], Collection[str]] = tuple,
) -> None:
    """Raise one `LayoutError` with all mistakes.

    Args:
        parameters: path → axes and shape, stacked axes included.
        batch: the axes and the shape of the *global* batch of tokens.
        activations: other arrays under the rows of `activations`, by what a message calls them: the stream between
            blocks, the arrays of an objective's batch.
        axes_used: returns all axes that the model names, `seq.residual` among them; called only where a row or a mesh
            axis has no effect on the arrays above.
    """
    found = _of_parameters(placement, parameters)
    found += [(problem, "the batch") for problem in _array_problems(placement, batch)]
    known = {problem for problem, _ in found}
    streams = [(p, where) for where, spec in activations.items() for p in _array_problems(placement, spec, KINDS[:1])]
    problems = _lines([*found, *((problem, where) for problem, where in streams if problem not in known)])
    problems += list(_batch_problems(placement, batch, placement.layout.microbatches))
    problems += context_problems(placement, parameters, batch.shape[batch.axes.index("seq")])
    split = {n for spec in (batch, *activations.values()) for n in spec.axes}
    problems += without_effect(placement, {n for s in parameters.values() for n in s.axes}, split, axes_used)
    if problems:
        raise LayoutError("\n".join(problems))


def validate_program(
    placement: Placement,
    parameters: Mapping[str, ArraySpec],
    activations: Collection[str],
    axes_used: Callable[[], Collection[str]],
) -> None:
    """Raise one `LayoutError` with all mistakes, for a program whose arrays have sizes that the program chooses.

    Args:
        parameters, axes_used: see `validate`. activations: some of the axes of its other arrays.
    """
    problems = _lines(_of_parameters(placement, parameters)) or without_effect(
        placement, {n for s in parameters.values() for n in s.axes}, activations, axes_used
    )
    if problems:
        raise LayoutError("\n".join(problems))


def _of_parameters(placement: Placement, parameters: Mapping[str, ArraySpec]) -> list[tuple[str, str]]:
    """(problem, where it is) of each parameter."""
    return [(p, f"parameter {path}") for path, spec in parameters.items() for p in _array_problems(placement, spec)]


def _lines(found: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each problem, of (problem, where it is)."""
    return [_line(problem, [w for p, w in found if p == problem]) for problem in dict.fromkeys(p for p, _ in found)]


def _line(problem: str, where: list[str]) -> str:
    """One line for a problem that several arrays may share."""
    others = f" Likewise: {', '.join(w.removeprefix('parameter ') for w in where[1:])}" if len(where) > 1 else ""
    return f"{where[0]}: {problem}.{others}"


def _array_problems(placement: Placement, spec: ArraySpec, kinds: Sequence[str] = KINDS) -> Iterator[str]:
    reported: set[str] = set()
    for kind in kinds:
        try:
            check_once(spec.axes, [placement.row(n, kind) for n in spec.axes], "it")
        except LayoutError as error:
            yield str(error)
            return
        for name, problem in _indivisible(placement, spec, kind):
            if name not in reported:  # a later kind starts from the rows of the one before it, and repeats its mistakes
                reported.add(name)
                yield problem


def _indivisible(placement: Placement, spec: ArraySpec, kind: str) -> Iterator[tuple[str, str]]:
    """(axis, problem) for each axis that cannot be split as the layout has it."""
    for name, size in zip(spec.axes, spec.shape, strict=True):
        num_shards = placement.num_shards(name, kind)
        over = " × ".join(f"{a!r} = {placement.mesh.shape[a]}" for a in placement.mesh_axes(name, kind))
        if name == "layers" and num_shards > 1:
            if problem := _not_stages(placement, size, over, kind):
                yield name, problem
        elif size % num_shards:
            padded = " (the model's field vocab_multiple pads it)" if name == "vocab" else ""
            yield (
                name,
                f"axis {name!r} of size {size} is not divisible by {num_shards}, the devices along mesh axis {over} "
                f"({kind}). Choose a size of {name!r} that {num_shards} divides{padded}, another size of the mesh "
                f"axis, or {_way_out(placement, name, size, kind)}",
            )


def _not_stages(placement: Placement, layers: int, over: str, kind: str) -> str | None:
    """Why mesh axes that split `layers` do not make stages of a pipeline of them; None if they do."""
    layout = placement.layout
    if placement.mesh_axes("layers", kind) != ("pipe",) or layout.auto:
        return (
            f"mesh axis {over} would split 'layers', which only the stages of a pipeline do: the mesh axis 'pipe', and "
            "Layout.auto = False. Give those devices to 'data' or 'tensor'"
        )
    stages, virtual = placement.stages, layout.schedule.virtual if layout.schedule else 1
    chunks = stages * virtual
    if (extra := -layers % chunks) and not layout.pad_layers:
        of_each = f" of {virtual} chunks each" if virtual > 1 else ""
        return (
            f"{layers} of a kind of layers do not divide into {stages} stages{of_each}. Layout.pad_layers = True adds "
            f"{extra} identity {'layer' if extra == 1 else 'layers'}, {extra / (layers + extra):.1%} of the blocks' "
            f"time. Or choose a number of layers that {chunks} divides" + _sizes_that_divide(layers, stages, virtual)
        )
    return None


def _sizes_that_divide(layers: int, stages: int, virtual: int) -> str:
    """The nearest sizes of the mesh axis `pipe` into which layers do divide, as the end of a sentence."""
    sizes = [size for size in range(2, layers + 1) if layers % (size * virtual) == 0]
    nearest = [*[size for size in sizes if size < stages][-1:], *[size for size in sizes if size > stages][:1]]
    return f", or a mesh axis 'pipe' of {' or '.join(map(str, nearest))}" if nearest else ""


def _way_out(placement: Placement, name: str, size: int, kind: str) -> str:
    """The field of the layout that would solve it."""
    tensor = placement.layout.mesh.get("tensor", 1)
    if base(name) == "kv_heads" and "tensor" in placement.row(name, kind) and 0 < size < tensor:
        return f"Layout.replicate_kv = {tensor // math.gcd(size, tensor)}, so that neighbours share them"
    return f"Layout.{'rows' if kind == 'activations' else kind} = {{{name!r}: None}}"


def _batch_problems(placement: Placement, batch: ArraySpec, microbatches: int) -> Iterator[str]:
    sequences = dict(zip(batch.axes, batch.shape, strict=True))["batch"]
    num_shards = placement.num_shards("batch") * microbatches
    if sequences % placement.num_shards("batch") == 0 and sequences % num_shards:
        yield (
            f"the batch: {sequences} sequences are not divisible by {num_shards}, which is "
            f"Layout.microbatches = {microbatches} × {placement.num_shards('batch')} devices along 'batch'"
        )


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
