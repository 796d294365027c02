"""`axon bench data`: tokens/s through the whole pipeline, beside what training takes here."""

from typing import Any

import jax

from axon.bench import reference
from axon.bench.timing import alternate, progress
from axon.data import Data, throughput
from axon.layout import Layout
from axon.train.step import Program
from models.llama import Llama


def run(
    data: Data | None = None,
    model: Llama = reference.MODEL,
    seconds: float = 3.0,
    rounds: int = 5,
) -> dict[str, Any]:
    """`tokens_per_second` that the pipeline delivers, `training` takes (the reference model here), and their `ratio`.

    The pipeline is all of it after preparation: shuffled reads of the token store, packing, and batches in threads.
    By default its text is the standard library's, its batches those of the reference shape.
    """
    data = data or Data(seq=reference.SEQ, batch=reference.BATCH)
    corpus = data.prepare(progress)
    with corpus.train(0) as batches:
        delivered = throughput(batches, seconds)
    used = _training(model, data.batch, data.seq, rounds)
    held = corpus.describe()["train"]
    return {
        "tokens_per_second": delivered,
        "training": used,
        "ratio": delivered / used,
        "corpus_tokens": sum(source["tokens"] for source in held.values()),
        "threads": data.threads,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result for people: (what, figure)."""
    return [
        ("the pipeline delivers", f"{result['tokens_per_second']:,.0f} tokens/s"),
        ("training takes", f"{result['training']:,.0f} tokens/s"),
        ("ratio", f"{result['ratio']:,.0f}"),
        ("tokens in the corpus", f"{result['corpus_tokens']:,}"),
        ("threads that read ahead", str(result["threads"])),
    ]


def _training(model: Llama, batch: int, seq: int, rounds: int) -> float:
    """Tokens/s of the training step, its batch at hand."""
    program = Program(model, Layout(mesh={"data": 1}), reference.OPTIMIZER, batch=batch, seq=seq, devices=_one())
    placed = program.place(reference.random_batch(0, batch, seq, model.vocab))
    state = [program.init()]

    def step():
        state[0], _ = jax.block_until_ready(program.step(state[0], placed))

    seconds = alternate({"step": step}, rounds)["step"]
    return batch * seq / float(sorted(seconds)[len(seconds) // 2])


def _one() -> list[Any]:
    return jax.devices("cpu")[:1]
