"""Using a trained run: its loss on any text, and generation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from axon.data import parse_source
from axon.data.records import RecordSource
from axon.errors import UserError
from axon.layout import Layout, LayoutError, first_devices
from axon.nn.quantized import quantized_format
from axon.nn.weight_transform import WeightTransform
from axon.run.beside import adapter_beside
from axon.run.held_out import HeldOutLoss, held_out_loss
from axon.run.references import read_references, sources_of
from axon.run.session import sample_text
from axon.run.trained import Trained, open_trained
from axon.run.tree import Sample, Train
from axon.run.weights import restore_as_stored
from axon.runtime import Runtime, flattened, nested
from axon.serve.export_programs import one_device
from axon.serve.logits import logits
from axon.serve.request import Sampling
from axon.train.adapters_off import AdaptersOff
from axon.train.evaluate import Evaluator
from axon.train.references import References
from axon.tune.comparisons import Comparisons
from axon.tune.examples import Examples
from axon.tune.labelled_texts import LabelledTexts
from models.heads import RewardModel, TextClassifier

Report = Callable[[str], None]


def evaluate_run(
    path: str | Path, source: str | None, batches: int | None, report: Report, adapter: str | None = None
) -> HeldOutLoss:
    """Loss on the run's held-out text, or on `source`; of a model of images on its held-out images.

    `path`: the folder of a run, whose latest checkpoint it is of, or `hf:DIR_OR_NAME`. adapter: as of `restored`.
    """
    trained = open_trained(path)
    train, data = trained.train, trained.train.data
    if data.text is not None and source is None:
        data = data.with_tokenizer(trained.tokenizer)
    elif data.text is not None and source is not None:
        data = _on_source(trained, data.text, parse_source(source))
    elif source is not None:
        raise UserError(f"{path} is a model of images, which --source has not: it is evaluated on those of its run")
    if source is None and not trained.has_text:
        if data.text is None:
            raise UserError(f"{path} has no images of its own to evaluate on: `axon convert` it, and set Train.data")
        raise UserError(f"{path} has no text of its own to evaluate on: give --source, as --source README.md")
    corpus = data.prepare(report)
    corpus.check_fits(train.model, train.objective, train.seq)
    runtime, values, variables = restored(trained, report, adapter=adapter)
    references = _references(train, runtime)
    text = None if corpus.tokenizer is None else corpus.tokenizer.to_json()
    read_references(train, references, sources_of(train, references, report), text, report)
    evaluator = Evaluator(runtime, train.objective, data.batch, train.seq, references)
    evaluator.check_arrays(corpus.arrays)
    return held_out_loss(evaluator, corpus, values, variables, batches)


def _on_source(trained: Trained, text: Any, source: Any) -> Any:
    """The data to evaluate on that a person names: records for a model that classifies or scores, else `text` of them.

    A text of a model that came from the hub ends as its tokenizer has it."""
    train, model = trained.train, trained.train.model
    shared: dict[str, Any] = {"sources": (source,), "weights": None, "held_out": 1.0, "tokenizer": trained.tokenizer}
    if not isinstance(model, TextClassifier | RewardModel):
        return replace(text, **shared)
    if not isinstance(source, RecordSource):
        raise UserError(
            f"--source: a {type(model).__name__} is evaluated on records, as of a .jsonl or .parquet file; this is a "
            f"{type(source).__name__}"
        )
    if isinstance(train.data, Examples):
        return replace(train.data, **shared)
    shared |= {"seq": train.seq, "batch": train.data.batch}
    if isinstance(model, TextClassifier):
        return LabelledTexts(**shared, labels=model.labels, end=False)
    return Comparisons(**shared)


def generate_text(
    path: str | Path,
    prompt: str,
    sampling: Sampling,
    report: Report,
    weights: str | None = None,
    adapter: str | None = None,
) -> str:
    """`prompt` and its continuation, or the answer of an encoder–decoder to it, by what `evaluate_run` takes; the
    others as of `restored`."""
    trained = open_trained(path)
    tokenizer, sample = trained.tokenizer.load(), Sample(prompt, sampling)
    return sample_text(*restored(trained, report, weights, adapter), tokenizer, sample)


def logits_of(path: str | Path, tokens: ArrayLike, report: Report = print) -> np.ndarray:
    """Logits as of `axon.serve.logits`, by what `evaluate_run` takes."""
    return logits(*restored(open_trained(path), report), tokens)


def restored(
    trained: Trained, report: Report, weights: str | None = None, adapter: str | None = None
) -> tuple[Runtime, Any, Any]:
    """A trained model's runtime, parameters and variables.

    `weights`: the dtype in which parameters are stored, as of `axon.runtime.Runtime`; None: their own. `adapter`: of
    `adapter_beside`, whose factors are used beside the model's own weights; None: none.
    """
    found = None if adapter is None else adapter_beside(adapter, trained)
    runtime = runtime_of(trained.train, report, weights, () if found is None else (found.lora,))
    values, variables = restore_as_stored(trained, runtime, report)
    if found is not None:
        flat = flattened(values)
        values = nested(flat | found.read(runtime, flat))
    return runtime, values, variables


def runtime_of(
    train: Train, report: Report = print, weights: str | None = None, transforms: Sequence[WeightTransform] = ()
) -> Runtime:
    """On the run's mesh where these devices allow it, else on one device, which is reported; the others as of
    `axon.runtime.Runtime`."""
    try:
        return _on(train, train.layout, first_devices(train.layout), weights, transforms)
    except LayoutError as error:
        report(f"on one device, as the run's layout does not fit here: {str(error).splitlines()[0]}")
        train = replace(train, execution=train.execution.on_devices)
        return _on(train, one_device(train.layout), jax.devices()[:1], weights, transforms)


def _references(train: Train, runtime: Runtime) -> References:
    """The frozen models of a run whose adapters are merged: where those were off it is the model before it had any."""
    off = {name: train.model for name, one in train.references.items() if isinstance(one, AdaptersOff)}
    models, used = train.reference_models | off, train.objective.references
    return References.of(train.objective, {name: models[name] for name in models if name in used}, runtime, train.seq)


def _on(
    train: Train, layout: Layout, devices: Sequence[Any], weights: str | None, transforms: Sequence[WeightTransform]
) -> Runtime:
    batch, seq = train.data.batch, train.seq
    if quantized_format(weights):  # XLA's CPU compiler aborts on a layer's scales out of a stack that is split
        layout = replace(layout, rows={**layout.rows, "layers": None}, pad_layers=False)
    options = {"precision": train.precision, "execution": train.execution, "devices": devices, "seq": seq}
    runtime = Runtime(train.model, layout, weights=weights, transforms=transforms, **options)
    train.objective.check(runtime.module)
    Evaluator(runtime, train.objective, batch, seq, _references(train, runtime)).check_layout()
    return runtime
