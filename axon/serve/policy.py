"""How a request's tokens are drawn, as arrays for the devices: what a step's rows ask of `axon.serve.sampler.draw`.

The shapes of a step's `SampleParams` are few, those of `variants`, so that all of their programs can be compiled
beforehand.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from axon.errors import UserError
from axon.serve.request import Sampling, check_ids
from axon.serve.sampler import ENTRY, RULE, SampleParams

BIASES = 1024
"""Ids that one request may have a bias for, at most: so many changed logits are accounted for."""

SMALLEST, GROWTH = 4096, 4
"""Changed logits that a step has room for: none, or the smallest number times a power of `GROWTH`."""

ID, BIAS, COUNT, SEEN = (ENTRY.index(name) for name in ("id", "bias", "count", "seen"))


class Policy:
    """How the tokens of one request are drawn, with what that depends on of its tokens so far.

    Args:
        sampling: as it was asked. prompt: its ids. vocab: how many ids the model predicts.

    Raises as `check_token_ids`.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab: int):
        check_token_ids(sampling, vocab)
        self.rule = _rule(sampling).tobytes()
        self._entries = _first_entries(sampling, prompt)
        self._places = {token: place for place, token in enumerate(self._entries[:, ID].tolist())}
        self._has_penalties = sampling.has_penalties

    @property
    def changes_logits(self) -> bool:
        """Whether it has penalties or a bias."""
        return self._has_penalties or len(self._entries) > 0

    def add(self, ids: Iterable[int]) -> None:
        """The text goes on by these; of no consequence without penalties."""
        if not self._has_penalties:
            return
        before, self._entries = len(self._entries), self.entries(ids)
        fresh = self._entries[before:, ID].tolist()
        self._places |= {token: before + place for place, token in enumerate(fresh)}

    def entries(self, drafts: Iterable[int] = ()) -> np.ndarray:
        """The logits that are changed, as if the text went on by `drafts`: see `SampleParams`; not to be written to."""
        drafts = list(drafts) if self._has_penalties else []
        if not drafts:
            return self._entries
        fresh = [token for token in dict.fromkeys(drafts) if token not in self._places]
        entries = np.concatenate([self._entries, _entries_of(fresh)])
        new = {token: len(self._entries) + place for place, token in enumerate(fresh)}
        for token in drafts:
            own = entries[new[token] if token in new else self._places[token]]
            own[COUNT] += 1
            own[SEEN] = 1
        return entries


class Row(NamedTuple):
    """One token to draw, or to look at.

    Args:
        policy: its request's. position: its place in the text, of which its noise is. drafts: tokens of the text that
            the policy was not told of. mask: of `Grammar.allowed`; None: all ids.
        scored_token: an id whose log-probability is wanted, and nothing is drawn; −1: none.
    """

    policy: Policy
    position: int
    drafts: Sequence[int] = ()
    mask: np.ndarray | None = None
    scored_token: int = -1


def draws(rows: Sequence[Row], size: int, vocab: int) -> SampleParams:
    """How `rows` are drawn, padded to `size`. Raises `ValueError` if there are more."""
    rules = _empty_rules(size)
    rules[: len(rows)] = np.frombuffer(b"".join([row.policy.rule for row in rows]), RULE)
    rules["position"][: len(rows)] = [row.position for row in rows]
    rules["scored_token"][: len(rows)] = [row.scored_token for row in rows]
    looked_at = rules["scored_token"] >= 0
    rules["temperature"][looked_at] = 0
    rules["logprobs"][looked_at] = np.maximum(rules["logprobs"][looked_at], 0)
    changing = any((row.policy.changes_logits or row.mask is not None) and row.scored_token < 0 for row in rows)
    changes = (_entries(rows, size), _mask(rows, size, vocab)) if changing else (None, None)
    return SampleParams(_bits(rules), *changes)


def variants(size: int, vocab: int, longest: int) -> list[SampleParams]:
    """Variants of no rows, of every shape that `draws` can have for `size` rows of requests whose prompt and text are
    `longest` tokens, or fewer: a program that has run with all of them compiles no more."""
    most, rooms = size * min(longest + BIASES, vocab), [SMALLEST]
    while rooms[-1] < most:
        rooms.append(rooms[-1] * GROWTH)
    rules, mask = _bits(_empty_rules(size)), _mask((), size, vocab)
    return [SampleParams(rules), *(SampleParams(rules, _padding(room, size), mask) for room in rooms)]


def _rule(sampling: Sampling) -> np.ndarray:
    """A `RULE`, but for what is of a row."""
    rule = np.zeros((), RULE)
    rule["seed_high"], rule["seed_low"] = divmod(sampling.seed, 2**32)
    rule["temperature"], rule["top_k"] = sampling.temperature, sampling.top_k or 0
    rule["top_p"] = 1 if sampling.top_p is None else sampling.top_p
    rule["min_p"] = sampling.min_p or 0
    rule["repetition"] = sampling.repetition_penalty
    rule["presence"], rule["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
    rule["logprobs"] = -1 if sampling.logprobs is None else sampling.logprobs
    return rule


def _first_entries(sampling: Sampling, prompt: Sequence[int]) -> np.ndarray:
    """Entries before the text begins: biases, and what the prompt has had where that counts."""
    biased = np.array(list(sampling.logit_bias), np.int32)
    seen = np.unique(np.array(prompt if sampling.repetition_penalty != 1 else [], np.int32))
    ids = np.union1d(biased, seen)
    entries = _entries_of(ids)
    entries[np.searchsorted(ids, seen), SEEN] = 1
    entries[np.searchsorted(ids, biased), BIAS] = np.array(list(sampling.logit_bias.values()), np.float32).view("u4")
    return entries


def _entries_of(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Entries that change nothing yet."""
    entries = np.zeros((len(ids), len(ENTRY)), np.uint32)
    entries[:, ID] = ids
    return entries


def check_token_ids(sampling: Sampling, vocab: int) -> None:
    """Raise `UserError` for biases and stop ids of ids that the model has not, or for more biases than `BIASES`."""
    if len(sampling.logit_bias) > BIASES:
        raise UserError(f"Sampling.logit_bias has {len(sampling.logit_bias)} ids; give {BIASES} at most")
    check_ids([*sampling.logit_bias], vocab, None, "Sampling.logit_bias")
    check_ids(sampling.stop_ids, vocab, None, "Sampling.stop_ids")


def _entries(rows: Sequence[Row], size: int) -> np.ndarray:
    """The changed logits of all rows, padded."""
    found = [row.policy.entries(row.drafts) if row.scored_token < 0 else _entries_of(()) for row in rows]
    counts = [len(own) for own in found]
    room, total = SMALLEST, sum(counts)
    while room < total:
        room *= GROWTH
    entries = _padding(room, size)
    np.concatenate(found, out=entries[:total])
    entries[:total, ENTRY.index("row")] = np.repeat(np.arange(len(rows)), counts)
    return entries


def _padding(count: int, size: int) -> np.ndarray:
    """Changed logits of a row past the last."""
    entries = np.zeros((count, len(ENTRY)), np.uint32)
    entries[:, ENTRY.index("row")] = size
    return entries


def _mask(rows: Sequence[Row], size: int, vocab: int) -> np.ndarray:
    """Bits `rows words`. Ids past the end of a row's own are not allowed."""
    mask = np.full((size, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for bits, row in zip(mask, rows, strict=False):
        if row.mask is not None and row.scored_token < 0:
            known = row.mask[: len(bits)]
            bits[: len(known)], bits[len(known) :] = known, 0
    return mask


def _empty_rules(size: int) -> np.ndarray:
    """Of padding: greedy."""
    rules = np.zeros(size, RULE)
    rules["logprobs"] = rules["scored_token"] = -1
    return rules


def _bits(rules: np.ndarray) -> np.ndarray:
    """`rows` of `RULE` as uint32 `rows rule`."""
    return rules.view(np.uint32).reshape(len(rules), len(RULE.fields or ()))
