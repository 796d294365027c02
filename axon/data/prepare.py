"""Documents → tokenizer → token store, each step cached by a fingerprint of its inputs."""

import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from axon.data.records import fingerprint
from axon.data.sources import Source
from axon.data.store import Root
from axon.data.tokenizer import BOS, Bpe, Tokenizer, read_tokenizer
from axon.data.tokens import TokenWriter
from axon.errors import UserError
from axon.signed_json import signed, unsigned

TOKENIZER_FORMAT = 3
FORMAT = 5
FILE = "tokenizer.json"
BLOCK = 4 * 2**20
PROGRESS_SECONDS = 10.0
SPLITS = ("train", "held_out")
COUNTS = ("documents", "replaced", "bytes", "token_bytes")
_UNPAIRED = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the rest of the surrogates are bytes of PEP 383

Report = Callable[[str], None]


class Document(NamedTuple):
    """One document, its size in UTF-8 bytes, and the split that the hash of its text puts it in.

    `replaced`: some of the source's bytes were not UTF-8, and are U+FFFD in `text`.
    """

    text: str
    bytes: int
    split: str
    replaced: bool


@dataclass(frozen=True)
class Stored:
    """One source's tokens in a store: where, and what they are."""

    source: str
    part: str
    splits: dict[str, dict[str, Any]]  # split → COUNTS, and what `TokenWriter.finish` returns


def documents(source: Source, held_out: float) -> Iterator[Document]:
    """The source's documents that are not empty; equal texts fall into the same split, whatever their source.

    Of a source that is one document its end is held out, as two documents of one text.

    Raises:
        UserError: there are none.
    """
    stream = (document for text in source.texts() if (document := _document(text, held_out)).bytes)
    first = list(itertools.islice(stream, 2))
    if not first:
        raise UserError(f"The source {source.name} ({source}) has no documents with text in them.")
    if len(first) == 1 and 0 < held_out < 1:
        first = _cut(first[0], held_out)
    yield from itertools.chain(first, stream)


def _document(given: str, held_out: float) -> Document:
    raw = _utf8(given)
    text = raw.decode()
    return Document(text, len(raw), "held_out" if share_of(raw) < held_out else "train", text != given)


def share_of(raw: bytes) -> float:
    """By the hash of a document: it is held out where `held_out` is more than that."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest()) / 2**64


def _cut(document: Document, held_out: float) -> list[Document]:
    """The document's beginning, to train on, and its end: `held_out` of it, from the beginning of a line on."""
    text = document.text
    place = round(len(text) * (1 - held_out))
    place = text.rfind("\n", 0, place) + 1 or place
    parts = {"train": text[:place], "held_out": text[place:]}
    return [Document(part, len(part.encode()), split, document.replaced) for split, part in parts.items() if part]


def _utf8(text: str) -> bytes:
    """`text`, with U+FFFD for what has no UTF-8: a file's own bytes (PEP 383), surrogates that JSON can spell."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        escaped = _UNPAIRED.sub("\ufffd", text).encode("utf-8", "surrogateescape")
        return escaped.decode("utf-8", "replace").encode()


def train_tokenizer(bpe: Bpe, sources: Iterable[Source], held_out: float, root: Root, report: Report) -> Tokenizer:
    """The BPE for these sources, trained on an equal share of training text from each, or read from the cache."""
    sources = tuple(sources)
    spec = fingerprint(TOKENIZER_FORMAT, bpe.vocab, bpe.sample, held_out, [source.key() for source in sources])
    folder = f"tokenizers/bpe-{bpe.vocab}-{spec}"
    began = time.perf_counter()
    trained = []

    def make(part: str) -> str:
        texts = (_sample(source, held_out, bpe.sample // len(sources)) for source in sources)
        trained.append(bpe.train(itertools.chain.from_iterable(texts), report))
        root.write_once(f"{part}/{FILE}", trained[0].to_json())
        return signed({"part": part, "crc32": root.crc32(f"{part}/{FILE}")})

    text = root.once(f"{folder}/manifest.json", make, report)
    with root.intact(folder):
        manifest = unsigned(text)
        file = f"{manifest['part']}/{FILE}"
        if root.crc32(file) != manifest["crc32"]:
            raise ValueError(f"{file} has a checksum other than when it was written")
        tokenizer = read_tokenizer(root.read(file) or "", BOS)
    done = f"trained in {time.perf_counter() - began:.1f} s" if trained else "reused"
    fewer = f" ({bpe.vocab:,} requested, the text has no more to merge)" if tokenizer.vocab < bpe.vocab else ""
    report(f"tokenizer: BPE of {tokenizer.vocab:,}{fewer}, {done}: {root.location}/{file}")
    return tokenizer


def _sample(source: Source, held_out: float, budget: int) -> Iterator[str]:
    for document in documents(source, held_out):
        if document.split == "train":
            yield document.text
            budget -= document.bytes
            if budget <= 0:
                return


def write_tokens(source: Source, tokenizer: Tokenizer, held_out: float, root: Root, report: Report) -> Stored:
    """The source's tokens, written now or read from the cache; equal keys mean equal tokens."""
    spec = fingerprint(FORMAT, source.key(), tokenizer.to_json(), tokenizer.bos, held_out)
    folder = f"tokens/{re.sub(r'[^A-Za-z0-9.-]+', '-', source.name)[:100]}-{spec}"
    began = time.perf_counter()
    written = []

    def make(part: str) -> str:
        written.append(part)
        splits = _tokenise(source, tokenizer, held_out, root, part, report)
        return signed({"format": FORMAT, "source": repr(source), "part": part, "splits": splits}, indent=1)

    text = root.once(f"{folder}/manifest.json", make, report)
    with root.intact(folder):
        manifest = unsigned(text)
        stored = Stored(source.name, manifest["part"], manifest["splits"])
        summary = _summary(stored)
    done = f"written in {time.perf_counter() - began:.1f} s" if stored.part in written else "reused"
    report(f"{source.name}: {summary}, {done}: {root.location}/{folder}")
    _warn_about_text(stored, report)
    _warn_about_bytes(stored, report)
    return stored


def _tokenise(
    source: Source, tokenizer: Tokenizer, held_out: float, root: Root, part: str, report: Report
) -> dict[str, dict[str, Any]]:
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    writers = {split: TokenWriter(root, f"{part}/{split}", dtype) for split in SPLITS}
    splits: dict[str, dict[str, Any]] = {split: dict.fromkeys(COUNTS, 0) for split in SPLITS}
    reported = time.perf_counter()
    for block in _blocks(documents(source, held_out)):
        for document, ids in zip(block, _encoded(source, tokenizer, block), strict=True):
            tokens = np.array([tokenizer.bos, *ids], dtype)
            writers[document.split].append(tokens)
            counts = splits[document.split]
            counts["documents"] += 1
            counts["replaced"] += document.replaced
            counts["bytes"] += document.bytes
            counts["token_bytes"] += int(tokenizer.byte_lengths[tokens].sum())
        if time.perf_counter() - reported > PROGRESS_SECONDS:
            reported = time.perf_counter()
            report(f"{source.name}: {sum(counts['documents'] for counts in splits.values()):,} documents so far")
    for split, writer in writers.items():
        splits[split] |= writer.finish()
    return splits


def _encoded(source: Source, tokenizer: Tokenizer, block: list[Document]) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([one.text for one in block])
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from error


def _blocks(stream: Iterator[Document]) -> Iterator[list[Document]]:
    """Lists of documents, each of about `BLOCK` bytes: what is in memory at once."""
    block, size = [], 0
    for document in stream:
        block.append(document)
        size += document.bytes
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _summary(stored: Stored) -> str:
    total = {key: sum(counts[key] for counts in stored.splits.values()) for key in ("documents", "bytes", "tokens")}
    held_out = stored.splits["held_out"]["tokens"]
    return (
        f"{total['documents']:,} documents, {total['bytes'] / 1e6:.1f} MB, "
        f"{total['tokens']:,} tokens ({held_out:,} held out)"
    )


def _warn_about_text(stored: Stored, report: Report) -> None:
    documents, replaced = (sum(counts[key] for counts in stored.splits.values()) for key in ("documents", "replaced"))
    if replaced:
        report(
            f"{stored.source}: {replaced:,} of {documents:,} documents are not UTF-8 throughout; U+FFFD stands in the "
            "tokens for what is not"
        )


def _warn_about_bytes(stored: Stored, report: Report) -> None:
    text = sum(counts["bytes"] for counts in stored.splits.values())
    tokens = sum(counts["token_bytes"] for counts in stored.splits.values())
    if text != tokens:
        report(
            f"{stored.source}: this tokenizer's ids stand for {tokens:,} bytes where the text has {text:,}, so bits "
            f"per byte will be off by {text / max(tokens, 1) - 1:+.2%}"
        )
