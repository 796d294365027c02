"""The inputs of a language model for each sequence of tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from axon.nn.kv_cache import PagedSizes, PagedStep, Ragged, paged_step
from axon.nn.rope import Angles, Rope
from axon.nn.sequence_rows import SequenceRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """One batch, or a part of it.

    Args:
        tokens: ids, `batch seq` int32. positions: place within the document, `batch seq` int32.
        documents: which document of the sequence, `batch seq` int32; None where sequences hold one each.
        start: index of the first token in the cache of keys and values; or whose the tokens are, where one row has
            those of many sequences; None without a cache.
        last: of each token the last position of its sequence, `batch seq` int32, where that is not the row's: by which
            LongRoPE chooses frequencies.
        key, sequences: the key from which dropout follows, and the number of each sequence in the global batch,
            `batch` int32; None where nothing is dropped.
        adapters: the number of the adapter that each sequence trains, `batch` int32, -1 for none; None: nobody says.
        score_bias: `batch seq heads _distances`, which attention that is `biased` adds to its scores: see
            `axon.nn.relative_bias`.
        encoded, encoded_documents: what an encoder made of another sequence, `batch seq.residual embed`, and its
            documents, `batch seq`; None where there is no encoder, and with a cache, which has what it made of them.
        place: of the layer among those of its kind, by which it finds its pages in the cache.
        angles, steps: those of the positions, and of the new tokens in pages, that were computed before the layers,
            once for all.
    """

    tokens: Array
    positions: Array
    documents: Array | None = None
    start: Array | Ragged | None = None
    last: Array | None = None
    key: Array | None = None
    sequences: Array | None = None
    adapters: Array | None = None
    score_bias: Array | None = None
    encoded: Array | None = None
    encoded_documents: Array | None = None
    place: Array | int = 0
    angles: tuple[Angles, ...] = ()
    steps: tuple[PagedStep, ...] = ()

    def in_layer(self, layer: Array | int, place: Array | int = 0) -> "Inputs":
        """The same, with a key of the layer's own, so that no two layers drop the same elements.

        `place`: its number among the layers that share a cache.
        """
        if self.key is None and place is self.place:
            return self
        return replace(self, key=None if self.key is None else jax.random.fold_in(self.key, layer), place=place)

    @property
    def rows(self) -> SequenceRows:
        """Whose the new tokens are, for a block that has a state of each sequence. Raises `ValueError` without `start`:
        no cache has a state."""
        if isinstance(self.start, Ragged):
            ragged, counts = self.start, jnp.diff(self.start.bounds)
            begins = (ragged.lens == counts) & (counts > 0)
            return SequenceRows(ragged.bounds[:-1], counts, begins, ragged.drafts, ragged.versions)
        if self.start is None:
            raise ValueError("Inputs: a state needs Inputs.start, which says whether its sequence begins")
        batch, seq = self.tokens.shape
        counts = jnp.full(batch, seq, jnp.int32)
        return SequenceRows(seq * jnp.arange(batch, dtype=jnp.int32), counts, jnp.full(batch, self.start == 0))

    def real_where(self, condition: Array | bool) -> "Inputs":
        """The same where `condition`, one for all, holds; else padding alone, if `documents` can say so."""
        if self.documents is None:
            return self
        return replace(self, documents=jnp.where(condition, self.documents, -1))

    def with_angles(self, ropes: Iterable[tuple[Rope, int]]) -> "Inputs":
        """The same, with the angles of each (rope, head_dim): computed in a layer, they would be in every layer."""
        return replace(self, angles=tuple(self.angles_of(*one) for one in dict.fromkeys(ropes)))

    def angles_of(self, rope: Rope, head_dim: int) -> Angles:
        """The angles for such heads: of `angles`, or computed here."""
        found = (a for a in self.angles if (a.rope, a.head_dim) == (rope, head_dim))
        return next(found, None) or rope.angles(self.positions, head_dim, self.last)

    def with_steps(self, sizes: Iterable[PagedSizes]) -> "Inputs":
        """The same, with the step of each of these sizes: made in a layer, they would be in every layer."""
        return replace(self, steps=tuple(self.step_of(one) for one in dict.fromkeys(sizes)))

    def step_of(self, sizes: PagedSizes) -> PagedStep:
        """The step of `steps`, or one made here, in the layer's own pages. Raises `ValueError` without `start`."""
        if self.start is None:
            raise ValueError("Inputs: a cache of keys and values needs Inputs.start, where to write to it")
        found = (step for step in self.steps if step.sizes == sizes)
        return (next(found, None) or paged_step(sizes, self.start)).in_layer(self.place)
