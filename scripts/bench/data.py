"""`axon bench data`: tokens/s through the whole pipeline, against those that training takes here."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from axon.data import Data
from axon.layout import Layout
from axon.train.step import Program
from models.llama import Llama
from scripts.bench import reference
from scripts.bench.timing import alternate, progress


def run(
    data: Data | None = None,
    model: Llama = reference.MODEL,
    seconds: float = 3.0,
    rounds: int = 5,
) -> dict[str, Any]:
    """`tokens_per_second` that the pipeline delivers, those that `training` the reference model takes, their `ratio`.

    The pipeline is everything after preparation: shuffled reads of the token store, packing, prefetching in threads.
    By default its text is the standard library's, its batches those of the reference shape.
    """
    data = data or Data(seq=reference.SEQ, batch=reference.BATCH)
    corpus = data.prepare(progress)
    with corpus.train(0) as batches:
        delivered = throughput(batches, seconds)
    used = _training(model, data.batch, data.seq, rounds)
    sources = corpus.describe()["train"]
    return {
        "tokens_per_second": delivered,
        "training": used,
        "ratio": delivered / used,
        "corpus_tokens": sum(source["tokens"] for source in sources.values()),
        "threads": data.threads,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    return [
        ("the pipeline delivers", f"{result['tokens_per_second']:,.0f} tokens/s"),
        ("training takes", f"{result['training']:,.0f} tokens/s"),
        ("ratio", f"{result['ratio']:,.0f}"),
        ("tokens in the corpus", f"{result['corpus_tokens']:,}"),
        ("threads that prefetch", str(result["threads"])),
    ]


def _training(model: Llama, batch: int, seq: int, rounds: int) -> float:
    """Tokens/s of the training step alone, on one batch."""
    program = Program(model, Layout(mesh={"data": 1}), reference.OPTIMIZER, batch=batch, seq=seq, devices=_one())
    placed = program.place(reference.random_batch(0, batch, seq, model.vocab))
    state = [program.init()]

    def step():
        state[0], _ = jax.block_until_ready(program.step(state[0], placed))

    seconds = alternate({"step": step}, rounds)["step"]
    return batch * seq / float(sorted(seconds)[len(seconds) // 2])


def _one() -> list[Any]:
    return jax.devices("cpu")[:1]


def throughput(batches: Iterator[dict[str, np.ndarray]], seconds: float) -> float:
    """Tokens per second that `batches` delivers, measured over about `seconds`."""
    next(batches)  # excludes the start of the threads
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        tokens += next(batches)["tokens"].size
    return tokens / elapsed
