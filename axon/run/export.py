"""`axon export`: a run, or a model of the Hugging Face hub, as a folder that runs without Axon."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from axon.disk import atomic_folder, check_new, named
from axon.model_config import vocab_of
from axon.run.trained import open_trained
from axon.runtime import Runtime, flattened
from axon.serve.export import check_dtypes, check_request, write_export
from axon.serve.export_programs import Sizes, export_programs, one_device

Report = Callable[[str], None]
TOKENIZER = "tokenizer.json"


def export_model(
    source: str, out: str | Path, platforms: Sequence[str], batch: int, length: int | None, report: Report
) -> None:
    """Write what `source`, the folder of a run or `hf:DIR_OR_NAME`, computes into the new folder `out`.

    `length`: positions of a sequence; the run's by default. Raises `UserError` for what cannot be exported, before
    anything is written.
    """
    out = named(out, "OUT")
    check_new(out, "OUT")
    trained = open_trained(source)
    train, tokenizer = trained.train, trained.tokenizer
    sizes, layout = Sizes(batch, length or train.seq), one_device(train.layout)
    runtime = Runtime(train.model, layout, precision=train.precision, devices=jax.devices()[:1])
    check_request(runtime.module, platforms, sizes)
    check_dtypes(runtime.parameters | runtime.variables)
    programs = {
        platform: export_programs(train.model, layout, train.precision, platform, sizes) for platform in platforms
    }
    for platform, (_, choices) in programs.items():
        for operation, choice in choices.items():
            report(f"{platform}: {operation}: {choice}")
    values, variables = trained.restore(runtime, train.model, report)
    loaded = tokenizer.load()
    about: dict[str, Any] = {"model": type(train.model).__name__, "source": str(source)}
    about |= {"vocab": vocab_of(train.model) or loaded.vocab, "batch": sizes.batch, "length": sizes.length}
    about["tokenizer"] = {"file": TOKENIZER, "bos": loaded.bos, "ends": sorted(loaded.ends)}
    with atomic_folder(out, "OUT") as part:
        shutil.copyfile(tokenizer.path, part / TOKENIZER)
        write_export(part, flattened(values) | flattened(variables), programs, about)
    size = f"batch {sizes.batch}, {sizes.length} positions"
    report(f"{about['model']} in {out}, for {', '.join(platforms)}, {size}: python {out}/run.py ID …")
