"""Looking at a run that was trained: its loss on any text, and texts that it continues."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from axon.checkpoint import Reader
from axon.data import TokenizerFile, parse_source
from axon.errors import UserError
from axon.layout import Layout, LayoutError
from axon.run.folder import RunFolder
from axon.run.session import held_out_loss, sample_text
from axon.run.tree import Sample, Train
from axon.serve.generate import Sampling
from axon.train.optimizer import AdamW
from axon.train.step import Program

Report = Callable[[str], None]


def evaluate_run(path: Path, source: str | None, batches: int | None, report: Report) -> tuple[float, float]:
    """Loss in nats per token and bits per byte of the latest checkpoint: on the run's held-out text, or on `source`."""
    folder = RunFolder.existing(path)
    train = folder.tree()
    data = replace(train.data, tokenizer=_tokenizer(folder, train))
    if source is not None:
        data = replace(data, sources=(parse_source(source),), weights=None, held_out=1.0)
    corpus = data.prepare(report)
    program, parameters = _restored(folder, train, report)
    return held_out_loss(program, corpus, parameters, batches)


def generate_text(path: Path, prompt: str, sampling: Sampling, report: Report) -> str:
    """`prompt` and what the latest checkpoint of a run continues it with."""
    folder = RunFolder.existing(path)
    train = folder.tree()
    tokenizer = _tokenizer(folder, train).load()
    program, parameters = _restored(folder, train, report)
    return sample_text(program, parameters, tokenizer, Sample(prompt, sampling))


def _tokenizer(folder: RunFolder, train: Train) -> TokenizerFile:
    """The one that the run was trained with, whatever its sources hold by now."""
    if not folder.tokenizer.is_file():
        raise UserError(f"there is no file {folder.tokenizer}: `axon train` on this run writes it again")
    trained_with = train.data.tokenizer
    return TokenizerFile(str(folder.tokenizer), trained_with.bos if isinstance(trained_with, TokenizerFile) else None)


def _restored(folder: RunFolder, train: Train, report: Report) -> tuple[Program, Any]:
    """The run's model and its latest parameters."""
    program = _program(train)
    reader = Reader(folder.checkpoints)
    parameters = reader.restore_parameters(program.abstract_state().parameters)
    count = program.placement.mesh.size
    report(f"parameters of step {reader.latest()}, on {count} device{'s' if count > 1 else ''}")
    return program, parameters


def _program(train: Train) -> Program:
    """On the run's mesh where these devices allow it, else on one device."""
    try:
        return _on(train, train.layout, jax.devices())
    except LayoutError:
        return _on(train, replace(train.layout, mesh={}), jax.devices()[:1])


def _on(train: Train, layout: Layout, devices: Sequence[Any]) -> Program:
    data = train.data
    optimizer = train.optimizer if isinstance(train.optimizer, AdamW) else train.optimizer.adamw
    return Program(
        train.model,
        layout,
        optimizer,
        batch=data.batch,
        seq=data.seq,
        precision=train.precision,
        devices=devices,
    )
