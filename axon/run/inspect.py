"""Using a trained run: its loss on any text, and generation."""

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
from axon.run.restore import restore_evaluated
from axon.run.session import held_out_loss, sample_text
from axon.run.tree import Sample, Train
from axon.runtime import Runtime
from axon.serve.generate import Sampling
from axon.train.evaluate import Evaluator

Report = Callable[[str], None]


def evaluate_run(path: Path, source: str | None, batches: int | None, report: Report) -> tuple[float, float]:
    """Loss in nats per token and bits per byte of the latest checkpoint: on the run's held-out text, or on `source`."""
    folder = RunFolder.existing(path)
    train = folder.tree()
    data = replace(train.data, tokenizer=_tokenizer(folder, train))
    if source is not None:
        data = replace(data, sources=(parse_source(source),), weights=None, held_out=1.0)
    corpus = data.prepare(report)
    runtime = runtime_of(train, report)
    values, variables = _restored(folder, train, runtime, report)
    return held_out_loss(Evaluator(runtime, train.objective, data.batch, data.seq), corpus, values, variables, batches)


def generate_text(path: Path, prompt: str, sampling: Sampling, report: Report) -> str:
    """`prompt` and its continuation by the latest checkpoint of a run."""
    folder = RunFolder.existing(path)
    train = folder.tree()
    tokenizer, sample = _tokenizer(folder, train).load(), Sample(prompt, sampling)
    runtime = runtime_of(train, report)
    values, variables = _restored(folder, train, runtime, report)
    return sample_text(runtime, values, variables, tokenizer, sample)


def _tokenizer(folder: RunFolder, train: Train) -> TokenizerFile:
    """The one that the run was trained with, even if its sources have changed since."""
    if not folder.tokenizer.is_file():
        raise UserError(f"there is no file {folder.tokenizer}: `axon train` on this run writes it again")
    trained_with = train.data.tokenizer
    bos = trained_with.bos if isinstance(trained_with, TokenizerFile) else None
    file, vocab = TokenizerFile(str(folder.tokenizer), bos), train.model.vocab
    if (ids := file.load().vocab) > vocab:
        raise UserError(f"{folder.tokenizer} has {ids} ids, and the run's model {vocab}: it belongs to another run")
    return file


def _restored(folder: RunFolder, train: Train, runtime: Runtime, report: Report) -> tuple[Any, Any]:
    """The parameters to evaluate and the variables of the latest checkpoint."""
    reader = Reader(folder.checkpoints)
    values, variables = restore_evaluated(reader, runtime, train.optimizer)
    count = runtime.placement.mesh.size
    report(f"parameters of step {reader.latest()}, on {count} device{'s' if count > 1 else ''}")
    return values, variables


def runtime_of(train: Train, report: Report = print) -> Runtime:
    """On the run's mesh where these devices allow it, else on one device, which is reported."""
    try:
        return _on(train, train.layout, jax.devices())
    except LayoutError as error:
        report(f"on one device, as the run's layout does not fit here: {str(error).splitlines()[0]}")
        return _on(train, replace(train.layout, mesh={}, replicate_kv=1, context=None), jax.devices()[:1])


def _on(train: Train, layout: Layout, devices: Sequence[Any]) -> Runtime:
    batch, seq = train.data.batch, train.data.seq
    runtime = Runtime(train.model, layout, precision=train.precision, kernels=train.kernels, devices=devices, seq=seq)
    Evaluator(runtime, train.objective, batch, seq).check_layout()
    return runtime
