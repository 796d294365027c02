"""Which way attention sees whole sequences, where a layout leaves it open."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axon.kernels.attention import Mask
from axon.parallel.context.route import route


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention in a model.

    Args:
        key_dim, value_dim: numbers of a head's key, and of its value. latent_dim: of what the keys and values of all
            heads of a position are made of, where there is such: an exchange sends it in their place.
    """

    heads: int
    kv_heads: int
    mask: Mask
    key_dim: int = 1
    value_dim: int = 1
    latent_dim: int | None = None


@dataclass(frozen=True)
class Split:
    """How attention is split.

    Args:
        seq: positions of a sequence. ring, ulysses: devices that they are split over, along the mesh axis `ulysses` and
            along others. heads: devices that heads are split over besides.
    """

    seq: int
    ring: int
    ulysses: int
    heads: int


def choose_context(kinds: Sequence[AttentionKind], split: Split) -> tuple[str, str]:
    """The name of the way, as in `Layout.context`, and why.

    A mesh with a mesh axis `ulysses` beside another asks for `usp`. Else a ring, which sends while it computes and
    gives all devices equal work; an all-to-all, which nothing overlaps, where it sends less than half as much, or where
    there is no ring; and gathered keys where there is neither.
    """
    size, both = split.ring * split.ulysses, split.ring > 1 and split.ulysses > 1
    gathered = sum(gathered_elements(kind, size) for kind in kinds)
    no_ring = ring_problem(kinds, split.ring if both else size, split.seq)
    no_exchange = exchange_problem(kinds, split, split.ulysses if both else size)
    if both and no_ring is None and no_exchange is None:
        return "usp", "the mesh has an axis 'ulysses' beside another that splits 'seq'"
    if both:
        no_exchange = exchange_problem(kinds, split, size)
        no_ring = ring_problem(kinds, size, split.seq)
    ring = sum(ring_elements(kind, size, split.seq) for kind in kinds) if no_ring is None else math.inf
    exchanged = sum(exchanged_elements(kind, split.heads, size) for kind in kinds) if no_exchange is None else math.inf
    if exchanged < ring / 2:
        other = f"a ring {ring / gathered:.0%}, which it would overlap" if no_ring is None else f"no ring: {no_ring}"
        return "ulysses", f"a forward sends {exchanged / gathered:.0%} of all keys and values; {other}"
    if no_ring is None:
        other = f"an all-to-all {exchanged / gathered:.0%}" if no_exchange is None else f"no all-to-all: {no_exchange}"
        return "ring", f"a forward sends {ring / gathered:.0%} of all keys and values, overlapped; {other}"
    return "gather", f"no ring: {no_ring}; no all-to-all: {no_exchange}"


def ring_problem(kinds: Sequence[AttentionKind], size: int, seq: int) -> str | None:
    """Why `size` devices cannot pass keys around; None where they can."""
    if seq % (2 * size):
        return f"{seq} positions do not divide into {2 * size} chunks"
    ways = (route((), size, kind.mask, seq) for kind in kinds)
    return next((way for way in ways if isinstance(way, str)), None)


def exchange_problem(kinds: Sequence[AttentionKind], split: Split, size: int) -> str | None:
    """Why `size` devices cannot exchange positions for heads; None where they can."""
    shards = split.heads * size
    return next((f"{k.heads} heads do not divide by {shards}" for k in kinds if k.heads % shards), None)


def gathered_elements(kind: AttentionKind, size: int) -> float:
    """What a device sends in a forward, in numbers for each of its positions."""
    return _keys(kind, kind.kv_heads) * (size - 1)


def ring_elements(kind: AttentionKind, size: int, seq: int) -> float:
    """The same, of a ring."""
    way = route((), size, kind.mask, seq)
    return 0 if isinstance(way, str) else _keys(kind, kind.kv_heads) * way.steps


def exchanged_elements(kind: AttentionKind, heads: int, size: int) -> float:
    """The same, of an all-to-all: of queries, outputs, and keys and values, each head of these as often as each device
    gets one; or of latents."""
    share = (size - 1) / size
    if kind.latent_dim is not None:
        return _keys(kind, kind.heads) * share + kind.latent_dim * (size - 1)
    return _keys(kind, kind.heads + math.lcm(kind.kv_heads, heads * size)) * share


def _keys(kind: AttentionKind, heads: int) -> int:
    """Keys and values, or queries and outputs, of so many heads."""
    return heads * (kind.key_dim + kind.value_dim)
