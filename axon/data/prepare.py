"""Documents → tokenizer → token store, each step done once and found again by what it was made from."""

import hashlib
import itertools
import json
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

FORMAT = 1
BLOCK = 4 * 2**20
PROGRESS_SECONDS = 10.0
SPLITS = ("train", "held_out")

Report = Callable[[str], None]


class Document(NamedTuple):
    """One document, its size in UTF-8 bytes, and the split that the hash of its text puts it in."""

    text: str
    bytes: int
    split: str


@dataclass(frozen=True)
class Stored:
    """One source's tokens in a store: where, and what they are."""

    source: str
    part: str
    splits: dict[str, dict[str, Any]]  # split → documents, tokens, bytes, digest


def documents(source: Source, held_out: float) -> Iterator[Document]:
    """The source's documents that hold any text; equal texts fall into the same split, whatever their source.

    Raises:
        UserError: there is not one.
    """
    empty = True
    for text in source.texts():
        raw = text.encode("utf-8", "replace")  # lone surrogates, which JSON can spell, have no bytes
        if raw:
            share = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest()) / 2**64
            yield Document(raw.decode(), len(raw), "held_out" if share < held_out else "train")
            empty = False
    if empty:
        raise UserError(f"The source {source.name} ({source}) has no documents with text in them.")


def train_tokenizer(bpe: Bpe, sources: Iterable[Source], held_out: float, root: Root, report: Report) -> Tokenizer:
    """The BPE for these sources, fitted to an equal share of training text from each, or the one fitted before."""
    sources = tuple(sources)
    spec = fingerprint(FORMAT, bpe.vocab, bpe.sample, held_out, [source.key() for source in sources])
    key = f"tokenizers/bpe-{bpe.vocab}-{spec}/tokenizer.json"
    began = time.perf_counter()
    made = []

    def make(part: str) -> str:
        texts = (_sample(source, held_out, bpe.sample // len(sources)) for source in sources)
        made.append(bpe.train(itertools.chain.from_iterable(texts)))
        return made[0].to_json()

    tokenizer = read_tokenizer(root.once(key, make, report), BOS, key)
    done = f"trained in {time.perf_counter() - began:.1f} s" if made else "reused"
    fewer = f" ({bpe.vocab:,} asked for, the text has no more to merge)" if tokenizer.vocab < bpe.vocab else ""
    report(f"tokenizer: BPE of {tokenizer.vocab:,}{fewer}, {done}: {root.location}/{key}")
    return tokenizer


def _sample(source: Source, held_out: float, budget: int) -> Iterator[str]:
    for document in documents(source, held_out):
        if document.split == "train":
            yield document.text
            budget -= document.bytes
            if budget <= 0:
                return


def write_tokens(source: Source, tokenizer: Tokenizer, held_out: float, root: Root, report: Report) -> Stored:
    """The source's tokens, as written now or found from before; equal keys hold equal tokens."""
    spec = fingerprint(FORMAT, source.key(), tokenizer.to_json(), tokenizer.bos, held_out)
    folder = f"tokens/{re.sub(r'[^A-Za-z0-9.-]+', '-', source.name)}-{spec}"
    began = time.perf_counter()
    made = []

    def make(part: str) -> str:
        made.append(part)
        splits = _tokenise(source, tokenizer, held_out, root, part, report)
        return json.dumps({"format": FORMAT, "source": repr(source), "part": part, "splits": splits}, indent=1)

    manifest = json.loads(root.once(f"{folder}/manifest.json", make, report))
    stored = Stored(source.name, manifest["part"], manifest["splits"])
    done = f"written in {time.perf_counter() - began:.1f} s" if manifest["part"] in made else "reused"
    report(f"{source.name}: {_summary(stored)}, {done}: {root.location}/{folder}")
    _warn_about_bytes(stored, report)
    return stored


def _tokenise(
    source: Source, tokenizer: Tokenizer, held_out: float, root: Root, part: str, report: Report
) -> dict[str, dict[str, Any]]:
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    writers = {split: TokenWriter(root, f"{part}/{split}", dtype) for split in SPLITS}
    splits: dict[str, dict[str, Any]] = {split: {"documents": 0, "bytes": 0, "token_bytes": 0} for split in SPLITS}
    said = time.perf_counter()
    for block in _blocks(documents(source, held_out)):
        for document, ids in zip(block, tokenizer.encode_batch([one.text for one in block]), strict=True):
            tokens = np.array([tokenizer.bos, *ids], dtype)
            writers[document.split].append(tokens)
            counts = splits[document.split]
            counts["documents"] += 1
            counts["bytes"] += document.bytes
            counts["token_bytes"] += int(tokenizer.byte_lengths[tokens].sum())
        if time.perf_counter() - said > PROGRESS_SECONDS:
            said = time.perf_counter()
            report(f"{source.name}: {sum(counts['documents'] for counts in splits.values()):,} documents so far")
    for split, writer in writers.items():
        splits[split] |= {"digest": writer.finish(), "tokens": writer.count}
    return splits


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
    held = stored.splits["held_out"]["tokens"]
    return (
        f"{total['documents']:,} documents, {total['bytes'] / 1e6:.1f} MB, "
        f"{total['tokens']:,} tokens ({held:,} held out)"
    )


def _warn_about_bytes(stored: Stored, report: Report) -> None:
    text = sum(counts["bytes"] for counts in stored.splits.values())
    tokens = sum(counts["token_bytes"] for counts in stored.splits.values())
    if text != tokens:
        report(
            f"{stored.source}: this tokenizer's ids stand for {tokens:,} bytes where the text has {text:,}, so bits "
            f"per byte will be off by {text / max(tokens, 1) - 1:+.2%}"
        )
