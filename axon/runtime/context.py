"""A placement whose way to see whole sequences has been chosen, where its layout leaves it open."""

import math
from dataclasses import replace
from typing import Any

from flax import nnx

from axon.layout import Placement
from axon.layout.table import ULYSSES
from axon.nn import Attention
from axon.parallel.context import AttentionKind, Split, choose_context


def with_context(placement: Placement, module: Any, seq: int) -> tuple[Placement, str | None]:
    """`placement` with a `Layout.context` for `module` and sequences of `seq` positions, and the choice as a line.

    As it is, with None, where the layout names one, or a role's row, and where nothing splits a sequence.
    """
    layout, split = placement.layout, placement.mesh_axes("seq")
    own = {"seq.attention", "heads.attention"} & set(layout.rows)
    kinds = {
        AttentionKind(one.heads, one.kv_heads, one.config.mask)
        for _, one in nnx.iter_modules(module)
        if isinstance(one, Attention)
    }
    if layout.context is not None or own or not split or not kinds:
        return placement, None
    ulysses = placement.mesh.shape[ULYSSES] if ULYSSES in split else 1
    ring = math.prod(placement.mesh.shape[a] for a in split) // ulysses
    sizes = Split(seq, ring, ulysses, placement.num_shards("heads"))
    name, why = choose_context(sorted(kinds, key=str), sizes)
    return replace(placement, layout=replace(layout, context=name)), f"{name}: {why}"
