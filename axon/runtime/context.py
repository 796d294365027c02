"""A placement whose way to see whole sequences has been chosen, where its layout leaves it open."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flax import nnx

from axon.errors import suggest
from axon.layout import LayoutError, Placement
from axon.layout.table import ULYSSES
from axon.nn import Attention, Depth, LatentAttention, MultiTokenBlock
from axon.parallel.context import AttentionKind, Split, choose_context

ByBlock = dict[str | None, set[AttentionKind]]
"""Kind of block → the attention in its blocks; None for attention that is in none."""


def with_context(placement: Placement, module: Any, seq: int | None) -> tuple[Placement, str | None]:
    """`placement` with a `Layout.context` for `module` and sequences of `seq` positions, and the choice as a line.

    As it is, with None, where the layout names one for all, or a role's row, where nothing splits a sequence, and where
    `seq` is None. Raises `LayoutError` for methods by kind of block, of kinds that `module` does not have.
    """
    layout, kinds = placement.layout, attention_by_block(module)
    if isinstance(layout.context, Mapping):
        _check(layout.context, kinds)
    own = {"seq.attention", "heads.attention"} & set(layout.rows)
    if isinstance(layout.context, str) or own or not kinds or seq is None or not placement.mesh_axes("seq"):
        return placement, None
    sizes = _split(placement, seq)
    if layout.context is None:
        name, why = _chosen(set().union(*kinds.values()), sizes)
        return replace(placement, layout=replace(layout, context=name)), f"{name}: {why}"
    rest = {str(kind): _chosen(kinds[kind], sizes) for kind in kinds if kind not in layout.context}
    context = {**layout.context, **{kind: name for kind, (name, _) in rest.items()}}
    lines = [f"{kind}: {name}" + (f", {rest[kind][1]}" if kind in rest else "") for kind, name in context.items()]
    return replace(placement, layout=replace(layout, context=context)), "; ".join(lines)


def _chosen(kinds: Iterable[AttentionKind], sizes: Split) -> tuple[str, str]:
    return choose_context(sorted(kinds, key=str), sizes)


def _split(placement: Placement, seq: int) -> Split:
    axes = placement.mesh_axes("seq")
    ulysses = placement.mesh.shape[ULYSSES] if ULYSSES in axes else 1
    ring = math.prod(placement.mesh.shape[a] for a in axes) // ulysses
    return Split(seq, ring, ulysses, placement.num_shards("heads"))


def attention_by_block(module: nnx.Module) -> ByBlock:
    """The kinds of attention in a model's kinds of block."""
    kind_of = {
        id(part): kind
        for _, owner in nnx.iter_modules(module)
        if isinstance(owner, Depth | MultiTokenBlock)
        for kind, block in owner.blocks.items()
        for _, part in nnx.iter_modules(block)
    }
    found: ByBlock = {}
    for _, one in nnx.iter_modules(module):
        if isinstance(one, Attention | LatentAttention):
            found.setdefault(kind_of.get(id(one)), set()).add(_kind(one))
    return found


def _kind(one: Attention | LatentAttention) -> AttentionKind:
    if isinstance(one, Attention):
        return AttentionKind(one.heads, one.kv_heads, one.config.mask, one.head_dim, one.head_dim)
    latent = one.dims["kv_latent"] + one.dims["rope_dim"]
    return AttentionKind(one.heads, one.heads, one.config.mask, one.width, one.dims["value_dim"], latent)


def _check(context: Mapping[str, str], kinds: ByBlock) -> None:
    known = [kind for kind in kinds if kind is not None]
    for kind in context:
        if kind not in known:
            raise LayoutError(
                f"Layout.context: no attention is in a kind of block named {kind!r}.{suggest(kind, known)}"
            )
    if None in kinds:
        raise LayoutError(
            f"Layout.context = {dict(context)!r} is by kind of block, and this model has attention outside of its "
            "blocks. Name one method for all, as in Layout.context = 'ring'"
        )
