"""`axon export --adapter`: the adapters of a run as PEFT saves them, for the model that they were trained beside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axon.checkpoint.huggingface.hub import PREFIX, is_hub, model_folder
from axon.checkpoint.huggingface.model import HubModel, open_model
from axon.checkpoint.huggingface.peft_factors import write_adapter
from axon.checkpoint.huggingface.save import Theirs, fetch_from
from axon.disk import atomic_folder, check_new, named
from axon.errors import UserError
from axon.nn.lora import LoRA
from axon.run.adapter import joined_in, lora_of_run
from axon.run.folder import RunFolder
from axon.run.init_from import InitFrom
from axon.run.inspect import runtime_of
from axon.run.pissa_adapter import beside_whole_weights
from axon.run.trained import Report, TrainedRun, run_and_adapter
from axon.run.tree import Train
from axon.runtime import Runtime, flattened


def export_adapter(run: str, out: str | Path, base: str | None, report: Report) -> None:
    """The last adapters of a run as the new folder `out`; where it trains several at once, the folder of each there.

    `base`: `hf:DIR_OR_NAME` of the model that they are of; by default what the run started from. Raises `UserError` for
    a run whose adapters are not all that it trained, or that the format cannot say.
    """
    out = named(out, "OUT")
    check_new(out, "OUT")
    path, adapter = run_and_adapter(run)
    names = () if adapter else RunFolder.existing(path).tree().adapters
    sources = {out / name: f"{run}:{name}" for name in names} or {out: run}
    with atomic_folder(out, "OUT") as part:
        written = {folder: _write(one, part / folder.relative_to(out), base, report) for folder, one in sources.items()}
    for folder, what in written.items():
        report(f"{what} in {folder}: axon serve {PREFIX}{folder}")


def _write(run: str, folder: Path, base: str | None, report: Report) -> str:
    """The adapter of a run in a folder; returns how much it is, for a person."""
    trained = TrainedRun(run)
    lora = lora_of_run(trained.train, run)
    hub = open_model(base or _base(trained.train, run))
    runtime = runtime_of(trained.train, report)
    own, nested_values, _ = trained.unmerged(runtime)
    values = flattened(nested_values)
    if not lora.keeps_weights:
        lora, own, values = beside_whole_weights(run, lora, own, values, hub)
    folder.mkdir(exist_ok=True)
    return write_lora(folder, lora, own, values, hub)


def write_lora(folder: Path, lora: LoRA, own: Runtime, values: Mapping[str, Any], hub: HubModel) -> str:
    """The factors of a runtime with `lora`, and what trains beside them, as PEFT's two files in a folder, for the model
    `hub`; `values`: its parameters by path. Returns how much it is, for a person."""
    factors, values = joined_in(own, hub, values, lora.others)
    name = hub.name.removeprefix(PREFIX)
    settings = {
        "base_model_name_or_path": str(hub.folder.absolute()) if Path(name).exists() else name,
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "lora_dropout": 0.0,
    }
    write_adapter(folder, factors, Theirs(factors.pieces, fetch_from(values)), settings, hub.whole_digest)
    more = f" and {', '.join(factors.saved)}" if factors.saved else ""
    count = (len(factors.pieces.shapes) - len(factors.saved)) // (2 + lora.dora)
    return f"{count} adapted matrices{more} of {hub.name}"


def _base(train: Train, run: str) -> str:
    given = train.init_from.source if isinstance(train.init_from, InitFrom) else train.init_from
    if given is not None and is_hub(given):
        model_folder(given)
        return given
    raise UserError(
        f"{run} started from {given or 'no other model'}, and an adapter of PEFT's is of a model of the hub's form: "
        f"write that one, axon convert {given or 'RUN'} hf:DIR, and name it, --base hf:DIR"
    )
