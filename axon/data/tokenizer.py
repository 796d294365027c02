"""Text ↔ ids: a byte-level BPE trained on the sources, or any local Hugging Face tokenizer.json."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from axon.checks import check_range
from axon.data.literal import literal
from axon.disk import check_paths, named, reading, writing
from axon.errors import UserError, suggest
from axon.fields import FilePath

BOS = "<|endoftext|>"
PIECE = 1024
"""Bytes of the pieces in which a longer word is counted: merging within one word takes the square of its length."""
_UNBROKEN = re.compile(rf"\S{{{PIECE}}}|\s{{{PIECE}}}")
_LONG_WORD = re.compile(rf"[^\W\d_]{{{PIECE}}}|\d{{{PIECE}}}|[^\w\s]{{{PIECE}}}|\s{{{PIECE}}}")
KNOWN_BOS = (BOS, "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>")
BYTES = 256


class Tokenizer:
    """Text to ids and back, with what bits per byte needs to know.

    Attributes:
        vocab: number of ids.
        bos: the id that opens every document, and so ends the one before it.
        ends: the ids at which generation stops.
        byte_tokens: the ids that spell a byte of a character, as `<0x0A>` does.
        byte_lengths: int32 `vocab`, the UTF-8 bytes an id stands for; 0 for special tokens. Exact for byte-level
            tokenizers, a best estimate for others.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, bos: int, ends: frozenset[int] | None = None, *, template: bool = False
    ):
        inner.no_padding()
        inner.no_truncation()
        self._json = inner.to_str()
        # Before special tokens in a text become plain text: a prompt's are special, as in `transformers`.
        self._template = tokenizers.Tokenizer.from_str(self._json) if template else None
        self.bos, self.ends = bos, frozenset([bos]) if ends is None else ends
        # `<|endoftext|>` written in a document is that text: only we place the special token.
        named = {token: inner.id_to_token(token) for token in (bos, *self.ends)}
        self._placed = {token: text for token, text in named.items() if text is not None}
        special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
        spec = json.loads(self._json)
        self._inner = literal(inner, special.union(self._placed.values()), spec)
        self._bytes = _bytes(self._inner, _mentions(spec, "ByteLevel"))
        self.byte_lengths = np.array([*map(len, self._bytes)], np.int32)
        self.vocab = len(self._bytes)
        spelled = (inner.token_to_id(f"<0x{byte:02X}>") for byte in range(BYTES))
        self.byte_tokens = frozenset(token for token in spelled if token is not None)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no special tokens added, and none of those that open or end documents.

        Raises `UserError` for what it cannot encode so.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each of `texts`, on all cores. Raises as `encode`."""
        try:
            encoded = in_background(lambda: self._inner.encode_batch_fast(list(texts), add_special_tokens=False))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"The tokenizer cannot encode this text: {error}") from error
        return [self._checked(one.ids, text) for one, text in zip(encoded, texts, strict=True)]

    def _checked(self, ids: list[int], text: str) -> list[int]:
        if self._placed.keys().isdisjoint(ids):
            return ids
        token = self._placed[next(token for token in ids if token in self._placed)]
        place = max(0, text.find(token) - 20)
        raise UserError(
            f"The tokenizer cannot encode this text: of {text[place : place + 60]!r} it makes {token!r}, which opens "
            "or ends documents. Set TokenizerFile.bos and TokenizerFile.ends to tokens that no text has"
        )

    def prompt(self, text: str) -> list[int]:
        """The ids of a document that begins with `text`: the special tokens of the tokenizer's template, or `bos`."""
        if self._template is None:
            return [self.bos, *self.encode(text)]
        return self._template.encode(text).ids

    def pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts as one document, and the type of each, as the tokenizer's template joins them: BERT's
        are 0 in `[CLS] first [SEP]`, and 1 in `second [SEP]`. Raises `UserError` for a tokenizer without a template,
        and for a template that has no token between them."""
        if self._template is None:
            raise UserError(
                "a pair of texts is joined by the template of a tokenizer.json, as TokenizerFile.prompts = 'template' "
                "uses it: set that, or write both into one text"
            )
        joined = self._template.encode(first, second)
        if (0, 1) in pairwise(joined.sequence_ids):
            raise UserError(
                "the tokenizer's template puts no token between the two texts of a pair: write both into one text, "
                "with what is to be between them"
            )
        return joined.ids, joined.type_ids

    def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text of `ids` after those of `prompt`, up to the first that ends it; special tokens are left out."""
        stop = next((place for place, token in enumerate(ids) if token in self.ends), len(ids))
        before, both = self.visible(prompt), self.visible([*prompt, *ids[:stop]])
        if both.startswith(before):  # decoded alone, the first word of some tokenizers loses its space
            return both[len(before) :]
        return self.visible(ids[:stop])

    def visible(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out; bytes that are no whole character become U+FFFD."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def is_visible(self, token: int) -> bool:
        """Whether it stands for text: it is neither special nor beyond the vocabulary."""
        return 0 <= token < self.vocab and bool(self.byte_lengths[token])

    def bytes_of(self, token: int) -> bytes:
        """What it stands for, perhaps a part of a character; nothing for a token that is not visible."""
        return self._bytes[token] if 0 <= token < self.vocab else b""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens shown; bytes that are no whole character become U+FFFD."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """What `TokenizerFile` and Hugging Face's own loaders read."""
        return self._json

    def literal_json(self) -> str:
        """`to_json` of the tokenizer as `encode` uses it, to which what opens and ends documents is special."""
        return self._inner.to_str()

    def save(self, path: str | Path) -> None:
        """Writes `tokenizer.json`."""
        with writing(path):
            Path(path).write_text(self.to_json(), encoding="utf-8")


@dataclass(frozen=True)
class Bpe:
    """Byte-level byte-pair encoding (Sennrich 2016, arXiv:1508.07909; on bytes as in GPT-2), trained on the sources.

    `vocab` counts the 256 bytes and `<|endoftext|>`; `sample` is how many bytes of training text it is fitted to.
    """

    vocab: int = 8192
    sample: int = 64 * 2**20

    def __post_init__(self):
        check_range(self, f"[{BYTES + 1}, 2**24]", "vocab")
        check_range(self, "[1, inf)", "sample")

    def train(self, texts: Iterator[str], report: Callable[[str], None] = print) -> Tokenizer:
        """Fits the merges to `texts`; fewer than `vocab` ids come out where the text has no more pairs to merge.

        `report` is given a line before the work, and one if some words are so long that they are trained on in pieces.
        """
        # A list, for the library reads an iterator in threads of its own, where Ctrl-C does not reach a slow source.
        sample = list(texts)
        report(f"tokenizer: training a BPE of {self.vocab:,} on {sum(map(len, sample)) / 1e6:.1f} million characters")
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = words, decoders.ByteLevel()
        if any(_UNBROKEN.search(text) and _LONG_WORD.search(text) for text in sample):
            report(f"tokenizer: the text has words of {PIECE:,} characters and more; it is trained on pieces of them")
            pieces = pre_tokenizers.Split(tokenizers.Regex(f".{{{PIECE}}}"), "isolated")
            inner.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab,
            special_tokens=[BOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        in_background(lambda: inner.train_from_iterator(sample, trainer))
        inner.pre_tokenizer = words
        return Tokenizer(inner, inner.get_vocab()[BOS])


@dataclass(frozen=True)
class TokenizerFile:
    """A `tokenizer.json` on disk.

    Attributes:
        bos: the token that opens a document; None looks for a usual one.
        ends: the tokens at which generation stops; None: `bos`.
        prompts: what a prompt to continue has besides its text: `bos` in front, or the special tokens of the file's own
            template ("template"), as a prompt of `transformers` has.
    """

    path: FilePath
    bos: str | None = None
    ends: tuple[str, ...] | None = None
    prompts: Literal["bos", "template"] = "bos"

    def __post_init__(self):
        check_paths(self)

    def load(self) -> Tokenizer:
        """Reads it.

        Raises:
            UserError: the file is missing or no tokenizer, or `bos` or one of `ends` is not in its vocabulary.
        """
        path = named(self.path, "TokenizerFile.path")
        with reading(path):
            text = path.read_text(encoding="utf-8")
        try:
            return read_tokenizer(text, self.bos, self.ends, template=self.prompts == "template")
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


def read_tokenizer(
    text: str, bos: str | None, ends: Sequence[str] | None = None, *, template: bool = False
) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json.

    Raises:
        ValueError: the library cannot read it, or it has no token `bos`, or none of `ends`.
    """
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        why = _json_error(text) or error
        raise ValueError(f"it is not a tokenizer.json that the tokenizers library reads: {why}") from error
    ids = [inner.token_to_id(name) for name in ([bos] if bos else KNOWN_BOS)]
    found = [number for number in ids if number is not None]
    if not found:
        special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
        wanted = f"no token {bos!r}" if bos else f"none of {', '.join(KNOWN_BOS)}"
        raise ValueError(
            f"it has {wanted} to open documents with: set TokenizerFile.bos; of a Hugging Face model, bos_token in its "
            f"tokenizer_config.json.{suggest(bos or '', special)}"
        )
    stops = None if ends is None else frozenset(_id(inner, name) for name in ends)
    return Tokenizer(inner, found[0], stops, template=template)


def _json_error(text: str) -> Exception | None:
    """The error of a text that is no JSON, which is clearer than the tokenizers library's."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return error
    return None


def _id(inner: tokenizers.Tokenizer, token: str) -> int:
    number = inner.token_to_id(token)
    if number is None:
        raise ValueError(f"it has no token {token!r} to end texts with: set TokenizerFile.ends")
    return number


def _bytes(inner: tokenizers.Tokenizer, is_byte_level: bool) -> list[bytes]:
    """Of each id, what it stands for; nothing of special tokens."""
    vocab = inner.get_vocab(with_added_tokens=True)
    added = inner.get_added_tokens_decoder()
    byte_level = _byte_characters() if is_byte_level else {}
    found = [b""] * (max(vocab.values()) + 1)
    for token, number in vocab.items():
        if number in added:
            found[number] = b"" if added[number].special else token.encode()
        elif byte_level.keys() >= set(token):
            found[number] = bytes(byte_level[sign] for sign in token)
        else:
            found[number] = token.encode() if byte_level else _spelled(token)
    return found


def _byte_characters() -> dict[str, int]:
    """The characters with which a byte-level token is spelled, one for each of its bytes (as in GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(BYTES + place): byte for place, byte in enumerate(others)}


def _spelled(token: str) -> bytes:
    """Of a SentencePiece token: `<0x0A>` is one byte, `▁` a space."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _mentions(tree: Any, kind: str) -> bool:
    """Whether any component of a tokenizer.json is of this `type`."""
    if isinstance(tree, dict):
        return tree.get("type") == kind or any(_mentions(tree[key], kind) for key in tree if key != "vocab")
    return isinstance(tree, list) and any(_mentions(part, kind) for part in tree)


T = TypeVar("T")


def in_background(work: Callable[[], T]) -> T:
    """`work()`, run by a thread: Python handles signals while the main thread waits, but not inside a call into Rust.

    Raises what `work` raises, or `KeyboardInterrupt`; then the thread goes on, and ends with the process.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again in the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    while not wait([future], timeout=1).done:  # a signal that another thread is given does not end a wait of this one
        pass
    return future.result()
