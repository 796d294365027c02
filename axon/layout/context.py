"""Whether a layout's way to see whole sequences fits its mesh, a model's heads and the sequences' length."""

import math
from collections.abc import Iterator, Mapping

from axon.axes.array_spec import ArraySpec
from axon.layout.placement import Placement, check_once
from axon.layout.table import ULYSSES, LayoutError

QUERIES = ("batch", "seq.attention", "heads.attention")


def context_problems(placement: Placement, parameters: Mapping[str, ArraySpec], seq: int) -> list[str]:
    """The mistakes, a line each. `parameters`: path → axes and shape; `seq`: positions of a sequence."""
    context = placement.layout.context
    if context is None:
        has_heads = any("heads" in spec.axes for spec in parameters.values())
        return list(_split_twice(placement, "attention")) if has_heads else []
    if not isinstance(context, Mapping):
        return [*_problems(placement, f"Layout.context = {context!r}", parameters), *_not_zigzag(placement, seq)]
    found = [
        problem
        for kind, method in context.items()
        for problem in _problems(
            placement.in_block(kind), f"Layout.context[{kind!r}] = {method!r}", _of_block(parameters, kind)
        )
    ]
    return [*found, *_not_zigzag(placement, seq)]


def _of_block(parameters: Mapping[str, ArraySpec], kind: str) -> Mapping[str, ArraySpec]:
    """The parameters of a kind of block: those in a stack of that name; all where there is no such stack."""
    return {path: spec for path, spec in parameters.items() if kind in path.split("/")} or parameters


def _problems(placement: Placement, chosen: str, parameters: Mapping[str, ArraySpec]) -> Iterator[str]:
    """Of the placement's one method, which is `chosen` by the layout."""
    if problem := _no_mesh_axis(placement, chosen):
        yield problem
        return
    problems = list(_split_twice(placement, f"attention by {chosen}"))
    yield from problems or _heads_that_do_not_divide(placement, chosen, parameters)


def _split_twice(placement: Placement, where: str) -> Iterator[str]:
    try:
        check_once(QUERIES, [placement.row(name) for name in QUERIES], where)
    except LayoutError as error:
        yield str(error)


def _not_zigzag(placement: Placement, seq: int) -> Iterator[str]:
    size = math.prod(placement.mesh.shape[a] for a in placement.ring)
    if size > 1 and seq % (2 * size):
        yield (
            f"Layout.context = {placement.layout.context!r}: a ring of {size} devices stores a sequence in {2 * size} "
            f"chunks, and {seq} positions do not divide into them. Choose a sequence length that {2 * size} divides, "
            "or Layout.context = 'gather'"
        )


def _no_mesh_axis(placement: Placement, chosen: str) -> str | None:
    """Why the mesh has not what the method needs; None if it has."""
    sizes = placement.mesh.shape
    if not placement.mesh_axes("seq"):
        return (
            f"{chosen} has no effect: no mesh axis of 2 or more splits 'seq'. Add one, as in "
            "Layout.mesh = {'context': 2, 'data': -1}, or set Layout.context to None"
        )
    if placement.context == "usp" and (sizes.get(ULYSSES, 1) == 1 or not placement.mesh_axes("seq.attention")):
        return (
            f"{chosen} splits 'seq' over two mesh axes of 2 or more: {ULYSSES!r} for its all-to-all, and "
            f"another for its ring, and here it is split over {' and '.join(map(repr, placement.mesh_axes('seq')))}. "
            f"Write both, as in Layout.mesh = {{'context': 2, {ULYSSES!r}: 2}}, or take 'ring' or 'ulysses'"
        )
    return None


def _heads_that_do_not_divide(placement: Placement, chosen: str, parameters: Mapping[str, ArraySpec]) -> Iterator[str]:
    shards, plain = placement.num_shards("heads.attention"), placement.num_shards("heads")
    if shards == plain:
        return
    over = " × ".join(f"{a!r} = {placement.mesh.shape[a]}" for a in placement.mesh_axes("seq"))
    first = {}
    for path, spec in parameters.items():
        if "heads" in spec.axes:
            first.setdefault(spec.shape[spec.axes.index("heads")], path)
    for heads, path in first.items():
        if heads % shards and heads % plain == 0:
            yield (
                f"parameter {path}: {heads} heads are not divisible by {shards}, and {chosen} exchanges positions for "
                f"heads among {shards // plain} devices of {over}, besides the {plain} that heads are split over. "
                f"Choose a smaller mesh axis, or {chosen.partition(' ')[0]} = 'ring'"
            )
