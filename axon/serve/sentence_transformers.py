"""What the files of sentence-transformers in a model's folder say of its embeddings.

`modules.json` lists what an embedding is made by: a transformer, a pooling, and perhaps its normalisation; each has a
folder with a config.json of its own. Without these files a model embeds as `axon.serve.pooling.Pooling` has it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from axon.checkpoint.huggingface.hub import CONFIG, MODULES, SENTENCE, SENTENCES
from axon.errors import UserError
from axon.foreign_json import FILE_NAME, FLAG, NULL, SIZE, TEXT, Kind, list_of, read_field, read_json
from axon.serve.pooling import Pooling

MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""Their field → ours."""
MODULE = Kind('an object with a text "type"', lambda one: type(one) is dict and type(one.get("type")) is str)
SWITCH = "pooling_mode_"
"""How those of all modes begin."""


@dataclass(frozen=True)
class Sentences:
    """pooling: of a text's tokens. length: tokens of a text, at most; None: as many as the model has positions."""

    pooling: Pooling
    length: int | None = None


def sentences_of(folder: Path | None, default: Pooling) -> Sentences:
    """As the files in a model's folder say; `default`: where they say nothing, or there is no folder.

    Raises `UserError` for what is not done here, as a module that is no pooling, or texts that begin with a prompt.
    """
    if folder is None:
        return Sentences(default)
    pooling = _pooling(folder, default) if (folder / MODULES).is_file() else default
    pooling = replace(pooling, cuts=_cuts(folder / CONFIG))
    if _field(folder / SENTENCE, "do_lower_case", FLAG):
        raise UserError(f"{folder / SENTENCE}: do_lower_case is true; texts are embedded as the tokenizer reads them")
    if (name := _field(folder / SENTENCES, "default_prompt_name", TEXT)) is not None:
        raise UserError(f"{folder / SENTENCES}: default_prompt_name is {name!r}; texts are embedded without a prompt")
    return Sentences(pooling, _field(folder / SENTENCE, "max_seq_length", SIZE))


def _pooling(folder: Path, default: Pooling) -> Pooling:
    """Of its modules, which have to be a transformer, a pooling and, perhaps, a normalisation."""
    modules = read_json(folder / MODULES, list_of(MODULE))
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{folder / MODULES}: the modules are {', '.join(kinds)}; must be Transformer, Pooling and, perhaps, "
            "Normalize"
        )
    path = folder / read_field(str(folder / MODULES), modules[1], "path", FILE_NAME) / CONFIG
    return replace(default, mode=_mode(path), normalise=kinds[-1] == "Normalize")


def _mode(path: Path) -> Any:
    """Of older files, with a field for each mode, and of those with a field that names it."""
    config = read_json(path)
    asked = [name for name, value in config.items() if name.startswith(SWITCH) and value is True]
    if (named := _field(path, "pooling_mode", TEXT)) is not None:
        asked += [name for name in MODES if MODES[name] == named.removesuffix("token")] or [f"pooling_mode {named!r}"]
    if len(asked) != 1 or asked[0] not in MODES:
        raise UserError(f"{path} asks for {', '.join(asked) or 'no mode'}; must be one of {', '.join(MODES)}")
    return MODES[asked[0]]


def _cuts(path: Path) -> tuple[int, ...] | None:
    """The cuts of `Pooling.cuts` that a config.json declares."""
    if listed := _field(path, "matryoshka_dimensions", list_of(SIZE)):
        return tuple(listed)
    return None if _field(path, "is_matryoshka", FLAG) else ()


def _field(path: Path, name: str, kind: Kind) -> Any:
    """None where the field, or the file, is absent."""
    return read_field(str(path), read_json(path) if path.is_file() else {}, name, kind | NULL, None)
