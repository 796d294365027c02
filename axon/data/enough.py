"""Whether a text is enough for a sequence of each split, how much of it is used, and whether a model has its ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from axon.data.batches import TokenSequences
from axon.data.prepare import SPLITS, Stored
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.model_config import vocab_of


class TextSettings(Protocol):
    """The fields of `Data` that a text is checked against."""

    @property
    def seq(self) -> int: ...

    @property
    def held_out(self) -> float: ...

    @property
    def weights(self) -> Sequence[float] | None: ...


def label(stored: Sequence[Stored], number: int) -> str:
    """The source's name, numbered where two share it."""
    name = stored[number].source
    earlier = sum(one.source == name for one in stored[:number])
    return f"{name}#{earlier + 1}" if earlier else name


def use_text(data: TextSettings, sequences: Mapping[str, TokenSequences], stored: Sequence[Stored], number: int) -> str:
    """How many sequences the splits of a source give, and how many tokens at its end are in none."""
    parts, seq, absent = [], data.seq, {0.0: "held_out", 1.0: "train"}.get(data.held_out)
    for split in SPLITS:
        if split == absent:
            continue
        count, counts = sequences[split].counts[number], stored[number].splits[split]
        documents, tokens = counts["documents"], counts["tokens"]
        left = tokens - (count * seq + 1 if count else 0)
        why = "" if count or not tokens else f", fewer than Data.seq + 1 = {seq + 1} and so not used"
        last = f", the last {left:,} tokens in none" if count and left else ""
        parts.append(
            f"{split.replace('_', ' ')}: {documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens{why}, "
            f"{count:,} sequence{'s' * (count != 1)}{last}"
        )
    return f"{label(stored, number)}: {'; '.join(parts)}"


def check_sequences(data: TextSettings, sequences: Mapping[str, TokenSequences], stored: Sequence[Stored]) -> None:
    """Raise `UserError`, before anything is trained, for a split that will be read and is shorter than one sequence."""
    tokens = {split: [one.splits[split]["tokens"] for one in stored] for split in SPLITS}
    need = f"a sequence needs Data.seq + 1 = {data.seq + 1}"
    if data.held_out > 0 and not len(sequences["held_out"]):
        if data.held_out == 1:
            raise UserError(f"The text has {sum(tokens['held_out']):,} tokens, {need}: give more text.")
        counts = [one.splits["held_out"]["documents"] for one in stored]
        raise UserError(
            f"The held-out split has {sum(counts)} documents with {sum(tokens['held_out']):,} tokens, {need}: "
            f"raise Data.held_out (now {data.held_out}), add text, lower Data.seq, or set Data.held_out to 0 to train "
            "without evaluation."
        )
    if data.held_out == 1:
        return
    if not len(sequences["train"]):
        raise UserError(f"The training split has {sum(tokens['train']):,} tokens, {need}: add text or lower Data.seq.")
    for number, count in enumerate(sequences["train"].counts if data.weights else []):
        if not count:
            count, name = tokens["train"][number], label(stored, number)
            raise UserError(f"The source {name} has {count:,} training tokens, {need}: remove it, or lower Data.seq.")


def check_vocab(model: Any, objective: Any, seq: int, tokenizer: Tokenizer, stored: Sequence[Stored]) -> None:
    """Raise `UserError` unless the model has an id for every token of the text.

    The objective's own ids, as a mask's, are the last of the vocabulary: none of a text's tokens may be one.
    """
    name, vocab = type(model).__name__, vocab_of(model)
    if vocab is None:
        raise UserError(f"Train.data is text, and a {name} has no vocab: set Train.model to a model of text")
    own, ids = objective.reserved_ids(seq), tokenizer.vocab
    most = (
        (one.splits[split]["largest"], label(stored, number)) for number, one in enumerate(stored) for split in SPLITS
    )
    largest, source = max(most)
    has = f"the model's vocab is {vocab}, and the tokenizer has {ids} ids, of which {source} has {largest}"
    if largest >= vocab:
        raise UserError(f"{has} ({tokenizer.decode([largest])!r}): set {name}.vocab to at least {ids}")
    if largest >= vocab - own:
        raise UserError(
            f"{has} ({tokenizer.decode([largest])!r}): {type(objective).__name__} needs the last {own} of the "
            f"vocabulary, which no text has. Set {name}.vocab to at least {ids + own}, or the tokenizer's vocab to at "
            f"most {vocab - own}"
        )
    objective.check_vocab(vocab, seq)
