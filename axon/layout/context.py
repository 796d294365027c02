"""Whether a layout's way to see whole sequences fits its mesh, a model's heads and the sequences' length."""

import math
from collections.abc import Iterator, Mapping

from axon.axes.array_spec import ArraySpec
from axon.layout.placement import Placement, check_once
from axon.layout.table import ULYSSES, LayoutError

QUERIES = ("batch", "seq.attention", "heads.attention")


def context_problems(placement: Placement, parameters: Mapping[str, ArraySpec], seq: int) -> Iterator[str]:
    """The mistakes, a line each. `parameters`: path → axes and shape; `seq`: positions of a sequence."""
    context, split = placement.layout.context, placement.mesh_axes("seq")
    if context is None:
        return
    if problem := _no_mesh_axis(placement, context):
        yield problem
        return
    try:
        check_once(QUERIES, [placement.row(name) for name in QUERIES], f"attention by {context!r}")
    except LayoutError as error:
        yield str(error)
        return
    over = " × ".join(f"{a!r} = {placement.mesh.shape[a]}" for a in split)
    size = math.prod(placement.mesh.shape[a] for a in placement.ring)
    if size > 1 and seq % (2 * size):
        yield (
            f"Layout.context = {context!r}: a ring of {size} devices stores a sequence in {2 * size} chunks, and {seq} "
            f"positions do not divide into them. Choose a sequence length that {2 * size} divides, or "
            "Layout.context = 'gather'"
        )
    yield from _heads_that_do_not_divide(placement, parameters, over)


def _no_mesh_axis(placement: Placement, context: str) -> str | None:
    """Why the mesh has not what the way needs; None if it has."""
    sizes = placement.mesh.shape
    if not placement.mesh_axes("seq"):
        return (
            f"Layout.context = {context!r} has no effect: no mesh axis of 2 or more splits 'seq'. Add one, as in "
            "Layout.mesh = {'context': 2, 'data': -1}, or set Layout.context to None"
        )
    if context == "usp" and (sizes.get(ULYSSES, 1) == 1 or not placement.ring):
        return (
            f"Layout.context = 'usp' splits 'seq' over two mesh axes of 2 or more: {ULYSSES!r} for its all-to-all, and "
            f"another for its ring, and here it is split over {' and '.join(map(repr, placement.mesh_axes('seq')))}. "
            f"Write both, as in Layout.mesh = {{'context': 2, {ULYSSES!r}: 2}}, or take 'ring' or 'ulysses'"
        )
    return None


def _heads_that_do_not_divide(placement: Placement, parameters: Mapping[str, ArraySpec], over: str) -> Iterator[str]:
    shards, plain = placement.num_shards("heads.attention"), placement.num_shards("heads")
    if shards == plain:
        return
    first = {}
    for path, spec in parameters.items():
        if "heads" in spec.axes:
            first.setdefault(spec.shape[spec.axes.index("heads")], path)
    for heads, path in first.items():
        if heads % shards and heads % plain == 0:
            yield (
                f"parameter {path}: {heads} heads are not divisible by {shards}, and Layout.context = "
                f"{placement.layout.context!r} exchanges positions for heads among {shards // plain} devices of "
                f"{over}, besides the {plain} that heads are split over. Choose a smaller mesh axis, or "
                "Layout.context = 'ring'"
            )
