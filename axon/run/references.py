"""The frozen models of a run, read from where they were trained."""

from collections.abc import Mapping
from dataclasses import replace

from axon.errors import UserError
from axon.run.init_from import InitFrom
from axon.run.initial_values import InitialValues
from axon.run.trained import Report
from axon.run.tree import Reference, Train
from axon.train.references import References

REFERENCES = "references"
"""Name in `extra` of what a checkpoint keeps of the frozen models: name → a digest of their source."""


def sources_of(train: Train, references: References, report: Report) -> dict[str, InitialValues]:
    """Name → where the arrays of a frozen model are read from. Reads none. Raises `UserError` unless they are what the
    model expects."""
    found: dict[str, InitialValues] = {}
    for name, runtime in references.runtimes.items():
        reference = train.references[name]
        as_trained = train  # without its adapters a model is what its run started from
        if isinstance(reference, Reference):
            as_trained = replace(train, model=reference.model, init_from=reference.source)
        elif train.init_from is None:
            raise UserError(
                f"Train.references[{name!r}] is AdaptersOff(), and this run started from no other, so that its model "
                "without adapters is nowhere: its own evaluations are in metrics.jsonl"
            )
        found[name] = InitialValues.of(as_trained, runtime, report)
    start = train.init_from
    if references.bases and isinstance(start, InitFrom) and start.adapter is not None:
        report(
            f"frozen model {next(iter(references.bases))!r}: {start.source} without {start.adapter}, from which this "
            f"run starts. With it: @Reference(), with Reference.source = {start.adapter!r}"
        )
    return found


def read_references(
    train: Train, references: References, sources: Mapping[str, InitialValues], tokenizer: str | None, report: Report
) -> None:
    """Give the frozen models their arrays, variables too, read straight into their shards.

    Raises `UserError` for a model of other tokens than those of `tokenizer`, a tokenizer.json's text.
    """
    for name, source in sources.items():
        runtime = references.runtimes[name]
        if tokenizer is not None:
            source.check_same_tokens(tokenizer, runtime)
        references.give(name, *source.source.restore(runtime, runtime.model, report))


def check_same_references(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise `UserError` for a frozen model whose source is not what the checkpoint was trained beside."""
    for name in here:
        if name in saved and saved[name] != here[name]:
            raise UserError(
                f"Train.references[{name!r}]: its source has changed since this run was saved ({saved[name]} then, "
                f"{here[name]} now), so the run would go on beside another model. Name one that does not change, as a "
                "copy of that checkpoint, or begin a new run with Train.init_from"
            )
