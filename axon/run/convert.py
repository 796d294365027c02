"""`axon convert`: a model of the Hugging Face hub as the folder of a run, and the other way."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from axon.checkpoint import Checkpoints, Store
from axon.checkpoint.huggingface.config import changed_fields, read_config, rewritten, unrepresented, write_config
from axon.checkpoint.huggingface.hub import CONFIG, GENERATION, PREFIX, copy_companions, is_hub
from axon.checkpoint.huggingface.model import HubModel, open_model
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.save import SHARD, Entry, Theirs, fetch_from, write_weights
from axon.checkpoint.huggingface.tables import table_for, table_of
from axon.checkpoint.huggingface.tokenizer import FILE, SETTINGS, special_id
from axon.checkpoint.huggingface.weights import DTYPES as STORED
from axon.data import TokenizerFile
from axon.data.tokenizer import Tokenizer
from axon.disk import atomic_folder, check_new, named
from axon.errors import UserError
from axon.foreign_json import object_of, one_of, read_json
from axon.model_config import vocab_of
from axon.nn.hugging_face import Architecture
from axon.observe.record import run_record
from axon.run.folder import RunFolder
from axon.run.inspect import runtime_of
from axon.run.trained import TrainedRun, run_of
from axon.run.tree import Train
from axon.run.unmerge import unmerge, weights_beside
from axon.runtime import flattened
from axon.tune.labelled_texts import LabelledTexts
from models.heads import RewardModel, TextClassifier

DTYPES = "dtypes.json"
"""File beside what came with the weights: the dtype of each array."""

Report = Callable[[str], None]


def convert(source: str, target: str, report: Report, without: str | None = None, shard: int = SHARD) -> None:
    """`hf:DIR_OR_NAME` into a run's folder, or a run's folder into `hf:DIR`; `shard`: bytes of a safetensors file.

    without: an adapter that is left out: of a run its own, by its name, and of `hf:` into `hf:` one that is merged.
    Raises `UserError` if the target is there already, or the model cannot be converted.
    """
    if is_hub(source) == is_hub(target) and not (without and is_hub(source)):
        raise UserError(f"axon convert {source} {target}: one of the two begins with {PREFIX}, as in {PREFIX}DIR")
    if without and not (is_hub(target) and is_hub(without) == is_hub(source) and (is_hub(source) or without == source)):
        raise UserError(
            f"--without {without}: write axon convert RUN {PREFIX}DIR --without RUN, for the weights beside which it "
            f"trains, or axon convert {PREFIX}MERGED {PREFIX}DIR --without {PREFIX}ADAPTER"
        )
    out = named(target.removeprefix(PREFIX), "the target")
    check_new(out, "the target")
    if without and is_hub(source):
        unmerge(source, without, out, report, shard)
    elif is_hub(source):
        _import(open_model(source), out, report)
    else:
        _export(TrainedRun(source), out, report, shard, adapted=not without)


def _import(hub: HubModel, out: Path, report: Report) -> None:
    """The folder of a run with the weights as its checkpoint of step 0, and what came with them."""
    for line in hub.remarks:
        report(line)
    train = run_of(hub, RunFolder(out).tokenizer, str(out))
    values, variables = hub.lazy(hub.model.build())  # a mistake in the weights is reported before anything is written
    with atomic_folder(out, "the target") as part:
        folder = RunFolder(part)
        folder.write(train, run_record() | {"from": hub.name})
        if train.data.text is not None:
            shutil.copyfile(hub.folder / FILE, folder.tokenizer)
        folder.companions.mkdir()
        copy_companions(hub.folder, folder.companions)
        shutil.copyfile(hub.folder / CONFIG, folder.companions / CONFIG)
        _write_json(folder.companions / DTYPES, hub.weights.dtypes)
        with Store(folder.checkpoints, Checkpoints(), folder.identifier()) as store:
            store.save(0, {"parameters": values, "variables": variables}, {"tokens": 0, "seed": train.seed})
    use = f"axon generate {out} --prompt …, or " if train.data.text is not None else ""
    report(f"{hub.name} is a run in {out}: {use}Train.init_from = {str(out)!r}")


def _export(trained: TrainedRun, out: Path, report: Report, shard: int, adapted: bool) -> None:
    """safetensors, and the files that `transformers` opens a model by. `adapted`: with the run's adapters merged."""
    train, kept = trained.train, trained.folder.companions
    config, table = _config(train, kept)
    tokenizer = trained.tokenizer if train.data.text is not None else None
    runtime = runtime_of(train, report)
    if adapted:
        values, variables = trained.restore(runtime, train.model, report)
    else:
        values, variables = weights_beside(trained, runtime)
    pieces = pieces_of(table, runtime.module, vocab_of(train.model))
    dtypes = read_json(kept / DTYPES, object_of(one_of(*STORED))) if (kept / DTYPES).is_file() else {}
    entries = [Entry(name, dtypes.get(name, "F32"), shape) for name, shape in pieces.shapes.items()]
    with atomic_folder(out, "the target") as part:
        theirs = Theirs(pieces, fetch_from(flattened(values) | flattened(variables)))
        files = write_weights(part, entries, theirs, shard)
        copy_companions(kept, part)
        if tokenizer is not None and not (kept / CONFIG).is_file():
            config |= _write_tokenizer(part, tokenizer, train, config)
            if isinstance(train.model, TextClassifier | RewardModel):
                config |= _write_padding(part, tokenizer.load(), train, report)
        _write_json(part / CONFIG, config)
    report(f"{table.name} in {out}: {len(entries)} arrays in {len(files)} file{'s' if len(files) > 1 else ''}")


def _config(train: Train, kept: Path) -> tuple[dict[str, Any], Architecture]:
    """The config.json of a run's model: that which it came with, where it still says all of it."""
    before = _there(kept / CONFIG)
    if before and not unrepresented(table := table_of(before), train.model):
        changed = changed_fields(table, read_config(table, before), train.model)
        return rewritten(table, before, train.model) if changed else before, table
    table = table_for(train.model)
    written = write_config(table, train.model)
    own = "n_positions" in written or train.data.text is None
    positions = {} if own else {"max_position_embeddings": train.seq}
    return positions | written | {"dtype": "float32"}, table


def _write_tokenizer(out: Path, file: TokenizerFile, train: Train, config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer of a run as `transformers` opens one, which puts into a prompt what generation here does; other
    settings that are there already, as a chat template, stay.

    Returns what the model's `config` says of it.
    """
    tokenizer = file.load()
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    opening = inner.id_to_token(tokenizer.bos)
    if file.prompts == "bos":
        inner.post_processor = TemplateProcessing(single=f"{opening} $A", special_tokens=[(opening, tokenizer.bos)])
    inner.save(str(out / FILE))
    ends = sorted(tokenizer.ends)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": train.seq}
    settings |= {"clean_up_tokenization_spaces": False, **_there(out / SETTINGS), "bos_token": opening}
    _write_json(out / SETTINGS, settings | ({"eos_token": inner.id_to_token(ends[0])} if ends else {}))
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    start = {name: config[name] for name in ("decoder_start_token_id",) if name in config}
    _write_json(out / GENERATION, _there(out / GENERATION) | ids | start)
    return ids


def _write_padding(out: Path, tokenizer: Tokenizer, train: Train, report: Report) -> dict[str, Any]:
    """The token of padding, into the tokenizer's settings: that which they name, else an end, else what opens a text.
    Never one in which texts end: `transformers` reads a class, or a score, at the last token that is no padding.

    Returns what the model's config says of it.
    """
    without_end = isinstance(train.data, LabelledTexts) and not train.data.end
    last = {tokenizer.prompt("a")[-1]} if without_end else tokenizer.ends
    named, ids = special_id(out, "", "pad_token"), vocab_of(train.model)
    candidates = [*([] if named is None else [named]), *sorted(tokenizer.ends), tokenizer.bos]
    found = [one for one in candidates if one in range(ids or 0) and one not in last]
    if not found:
        report(
            "config.json has no pad_token_id, as the tokenizer has no special token besides that in which texts end: "
            "transformers reads one text at a time. Train with LabelledTexts.end = False, or name a pad_token in "
            f"{SETTINGS} beside the tokenizer"
        )
        return {}
    _write_json(out / SETTINGS, _there(out / SETTINGS) | {"pad_token": tokenizer.decode(found[:1])})
    return {"pad_token_id": found[0]}


def _there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
