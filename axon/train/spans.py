"""The objective of T5: spans that are left out of a sequence, written by the decoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon import axes
from axon.checks import check_range
from axon.errors import UserError
from axon.nn import Inputs, cross_entropy
from axon.train.objective import SEQUENCES, Batch, Objective, Sums, sequences_of
from axon.train.random_words import random_words


@runtime_checkable
class WritesSpans(Protocol):
    """A module that this objective trains, an encoder–decoder; `start_id`: what its decoder is given first."""

    start_id: int
    encode: Callable[..., Any]
    decode: Callable[..., Any]


@dataclass(frozen=True)
class SpanCorruption(Objective):
    """The negative log-likelihood of spans of tokens that are left out, in nats (Raffel et al., arXiv:1910.10683,
    section 3.1.4).

    Of each sequence the share `density` is left out, in spans of `span` tokens on average: as many of both in every
    sequence, where they are is drawn anew in each step. The encoder reads the sequence with a sentinel in place of each
    span; the decoder writes each sentinel and its span, and a last sentinel. Sequences are taken as they are, with the
    documents that they pack, as T5 did.

    The draw follows from the run's seed, the step and the sequence's number in the global batch: it depends neither on
    the layout nor on microbatches, and a resumed run draws the same. Evaluation draws the same for every batch.

    Args:
        multiple: lengths are padded to a multiple of it; what splits `seq` in the layout must divide it.
        sentinel_id: the id of the first sentinel, from which the others go backwards; the last one of the model's
            vocabulary by default, which must then have as many more than the tokenizer.
    """

    unit: ClassVar[str] = "predicted token"

    density: float = 0.15
    span: float = 3.0
    multiple: int = 8
    sentinel_id: int | None = None

    def __post_init__(self):
        check_range(self, "(0, 1)", "density")
        check_range(self, "[1, inf)", "span")
        check_range(self, "[1, 2**31)", "multiple")
        check_range(self, "[0, 2**31)", "sentinel_id")

    def check(self, module: Any) -> None:
        if not isinstance(module, WritesSpans):
            raise UserError(
                "SpanCorruption needs a model with encode, decode and start_id, what its decoder is given first, as "
                f"models.t5.T5 builds one; build() returns a {type(module).__name__}"
            )

    def reserved_ids(self, seq: int) -> int:
        return self.sentinels(seq) if self.sentinel_id is None else 0

    def check_vocab(self, vocab: int, seq: int) -> None:
        if self.sentinel_id is not None and not (count := self.sentinels(seq)) - 1 <= self.sentinel_id < vocab:
            raise UserError(
                f"SpanCorruption.sentinel_id is {self.sentinel_id}; must be in [{count - 1}, {vocab}), for the {count} "
                f"sentinels of {seq} tokens go backwards from it, and the model's vocab is {vocab}"
            )

    def sentinels(self, seq: int) -> int:
        """How many a sequence has. Raises as `sizes`."""
        return self.sizes(seq)[1] + 1

    def sizes(self, seq: int) -> tuple[int, int]:
        """How many tokens of a sequence are left out, and in how many spans. Raises `UserError` for one too short."""
        noise = max(1, round(self.density * seq))
        spans = max(1, round(noise / self.span))
        if seq - noise < spans:
            raise UserError(
                f"SpanCorruption: {noise} of {seq} tokens in {spans} spans leave fewer than one between each two; "
                "lower its density, or raise its span"
            )
        return noise, spans

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        """`tokens` and `documents` of the encoder; `written` and `written_documents` of the decoder, its `targets` and
        their `counted`, 1 or 0; and `weights`, those of the tokens that were read."""
        noise, spans = self.sizes(batch["tokens"].shape[1])
        words = (random_words(key, name, batch) for name in ("noise", "rest"))

        # Orders are asked for here: in the region where all mesh axes are manual, a placement knows of none.
        natural = np.argsort(_stored(batch["tokens"].shape[1]))

        def local(*stored: Array) -> dict[str, Array]:
            tokens, weights, of_noise, of_rest = (x[:, natural] for x in stored)
            left_out, number = _left_out(of_noise, of_rest, noise, spans)
            return self._cut(tokens, weights, left_out, number, noise, spans, module)

        drawn = axes.by_sequence(local, batch["tokens"], batch["weights"], *words)
        drawn = {name: axes.shard(x[:, _stored(x.shape[1])], "batch seq") for name, x in drawn.items()}
        return {"weights": batch["weights"], SEQUENCES: batch[SEQUENCES], **drawn}

    def counts(self, batch: Batch) -> dict[str, Array]:
        return {"tokens": jnp.sum(batch["weights"])} | dict.fromkeys(("span", "loss"), jnp.sum(batch["counted"]))

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        sequences = sequences_of(batch, key)

        def inputs(tokens: str, documents: str) -> Inputs:
            return Inputs(batch[tokens], jnp.zeros_like(batch[tokens]), batch[documents], key=key, sequences=sequences)

        encoded, auxiliary = module.encode(inputs("tokens", "documents"))
        x, own = module.decode(inputs("written", "written_documents"), encoded, batch["documents"])
        loss, nll = cross_entropy(x, module.output, batch["targets"], batch["counted"])
        return Sums({"span": loss}, {"loss": nll}).with_auxiliary(auxiliary + own)

    def _cut(
        self, tokens: Array, real: Array, left_out: Array, number: Array, noise: int, spans: int, module: Any
    ) -> dict[str, Array]:
        """`draw`'s arrays of `tokens[batch seq]`, where `left_out` those in spans, whose `number` each is."""
        sentinels = module.vocab - 1 if self.sentinel_id is None else self.sentinel_id
        first = left_out & ~jnp.pad(left_out, ((0, 0), (1, 0)))[:, :-1]
        sentinel = sentinels - number
        read = jnp.where(left_out, sentinel, tokens)
        encoder = _kept(~left_out | first, tokens.shape[1] - noise + spans, read, real)
        pairs = ((first, left_out), (sentinel, tokens), (real, real))
        keep, ids, counted = (jnp.stack(pair, -1).reshape(len(tokens), -1) for pair in pairs)
        targets, counted = _kept(keep, noise + spans, ids, counted)
        targets = jnp.pad(targets, ((0, 0), (0, 1)), constant_values=sentinels - spans)
        counted = jnp.concatenate([counted, real[:, -1:]], axis=1)
        written = jnp.pad(targets, ((0, 0), (1, 0)), constant_values=module.start_id)[:, :-1]
        arrays = dict(zip(("tokens", "documents"), encoder, strict=True))
        arrays |= {"written": written, "written_documents": counted, "targets": targets, "counted": counted}
        padded = {name: self._padded(x) for name, x in arrays.items()}
        documents = {name: jnp.where(padded[name] > 0, 0, -1) for name in ("documents", "written_documents")}
        return padded | documents

    def _padded(self, x: Array) -> Array:
        """With zeros at its end."""
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.multiple)))


def _stored(seq: int) -> np.ndarray:
    scope = axes.current()
    return np.arange(seq) if scope is None else scope.placement.stored_positions(seq)


def _left_out(of_noise: Array, of_rest: Array, noise: int, spans: int) -> tuple[Array, Array]:
    """Which tokens of each sequence are left out, and the number of the span of each, `batch seq`.

    Tokens that stay and those that do not are both cut into as many segments of random lengths, and come in turn.
    """
    seq = of_noise.shape[1]
    rest, gone = _lengths(of_rest, seq - noise, spans), _lengths(of_noise, noise, spans)
    ends = jnp.cumsum(jnp.stack([rest, gone], -1).reshape(len(rest), -1), axis=1)
    segment = jnp.sum(jnp.arange(seq)[None, :, None] >= ends[:, None, :], axis=-1)
    return segment % 2 == 1, segment // 2


def _lengths(words: Array, total: int, parts: int) -> Array:
    """`batch parts`: lengths of at least 1 that add up to `total`, by where the largest of the random `words` are."""
    if parts == 1:
        return jnp.full((len(words), 1), total)
    _, places = jax.lax.top_k(words[:, : total - 1], parts - 1)
    ends = jnp.sort(places, axis=1) + 1
    return jnp.diff(ends, axis=1, prepend=0, append=total)


def _kept(keep: Array, count: int, *arrays: Array) -> list[Array]:
    """The elements of each of `arrays[batch seq]` that are to `keep`, in their order: `count` in every sequence."""
    order = jnp.argsort(~keep, axis=1, stable=True)[:, :count]
    return [jnp.take_along_axis(x, order, axis=1) for x in arrays]
