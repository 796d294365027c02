"""The host's time per step: the run's own loop around a step that computes nothing."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.data import Data, Feed
from axon.data.batches import Batches, TokenSequences, token_batches, training_order
from axon.data.store import Root
from axon.data.tokens import TokenWriter, open_tokens
from axon.observe.metrics import MetricsFile
from axon.observe.progress import Progress
from axon.train.loop import Loop, Record
from axon.train.step import Program, State

WARMUP = 20

SEQUENCES = 2**16
"""A small corpus, 16.8 million tokens at seq 256; of far fewer sequences grain takes longer to draw each."""


def host_seconds(program: Program, state: State, steps: int) -> float:
    """Seconds per step of the training loop, averaged over `steps`, its step a no-op on `state`, which is donated.

    It includes the data pipeline's iterator, placing the batch, dispatch, reading the metrics, the metrics file and
    showing progress.
    """
    with (
        TemporaryDirectory() as folder,
        _batches(program, folder) as batches,
        MetricsFile(Path(folder, "metrics.jsonl")) as metrics,
    ):
        shown = Progress(WARMUP + steps, io.StringIO())
        loop = _loop(program, batches, metrics, shown)
        state, step = loop.advance(state, 0, WARMUP)
        begun = perf_counter()
        loop.advance(state, step, WARMUP + steps)
        return (perf_counter() - begun) / steps


def no_op(program: Program) -> Callable[[State, Mapping[str, Array]], tuple[State, dict[str, Array]]]:
    """A compiled step with the arguments, results and donation of `program.step`, which only counts."""
    names = ("loss", "grad_norm", "learning_rate")
    parameters = len(program.parameters)

    def step(state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        metrics = {name: jnp.ones(()) for name in names} | {"norms": jnp.ones(parameters)}
        return replace(state, step=state.step + 1), metrics | {"tokens": jnp.sum(batch["weights"])}

    state, batch = program.abstract_state(), program.evaluator.abstract_batch
    with program.runtime.tracing():
        return jax.jit(step, donate_argnums=0).lower(state, batch).compile()


def _loop(program: Program, feed: Feed, metrics: MetricsFile, progress: Progress) -> Loop:
    def log(record: Record) -> None:
        record = record | {"mfu": 0.0}
        metrics.append(record)
        progress.update(record["step"], record["loss"], record["tokens_per_second"], record["mfu"])

    return Loop(program, no_op(program), feed, log, position=str, stop=lambda behind: False)


def _batches(program: Program, folder: str) -> Batches:
    """Training batches of random tokens, `SEQUENCES` in all: finding a sequence takes longer the more there are."""
    root = Root(folder)
    writer = TokenWriter(root, "tokens", np.dtype(np.uint16))
    random = np.random.default_rng(0)
    writer.append(random.integers(0, 2**15, SEQUENCES * program.seq + 1, np.uint16))
    sequences = TokenSequences(["random"], [open_tokens(root, "tokens", writer.finish(), vocab=2**15)], program.seq)
    order = training_order(sequences, None, program.batch, seed=0)
    return token_batches(order, sequences, 0, program.batch, slice(None), Data.threads)
