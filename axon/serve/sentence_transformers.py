"""What the files of sentence-transformers in a model's folder say of its embeddings.

`modules.json` lists what an embedding is made by: a transformer, a pooling, and perhaps its normalisation; each has a
folder with a config.json of its own. Without these files a model embeds as `axon.serve.pooling.Pooling` has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from axon.checkpoint.huggingface.hub import CONFIG, MODULES, SENTENCE, SENTENCES
from axon.checkpoint.huggingface.model import read_json
from axon.errors import UserError
from axon.serve.pooling import Pooling

MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""Their field → ours."""
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
    pooling = replace(pooling, cuts=_cuts(read_json(folder / CONFIG)))
    about = _optional(folder / SENTENCE)
    if about.get("do_lower_case"):
        raise UserError(f"{folder / SENTENCE}: do_lower_case is true; texts are embedded as the tokenizer reads them")
    if (name := _optional(folder / SENTENCES).get("default_prompt_name")) is not None:
        raise UserError(f"{folder / SENTENCES}: default_prompt_name is {name!r}; texts are embedded without a prompt")
    return Sentences(pooling, about.get("max_seq_length"))


def _pooling(folder: Path, default: Pooling) -> Pooling:
    """Of its modules, which have to be a transformer, a pooling and, perhaps, a normalisation."""
    modules: Any = read_json(folder / MODULES)
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{folder / MODULES}: the modules are {', '.join(kinds)}; must be Transformer, Pooling and, perhaps, "
            "Normalize"
        )
    path = folder / modules[1]["path"] / CONFIG
    return replace(default, mode=_mode(path, read_json(path)), normalise=kinds[-1] == "Normalize")


def _mode(path: Path, config: Mapping[str, Any]) -> Any:
    """Of older files, with a field for each mode, and of those with a field that names it."""
    asked = [name for name, value in config.items() if name.startswith(SWITCH) and value is True]
    if (named := config.get("pooling_mode")) is not None:
        asked += [name for name in MODES if MODES[name] == str(named).removesuffix("token")] or [
            f"pooling_mode {named!r}"
        ]
    if len(asked) != 1 or asked[0] not in MODES:
        raise UserError(f"{path} asks for {', '.join(asked) or 'no mode'}; must be one of {', '.join(MODES)}")
    return MODES[asked[0]]


def _cuts(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Those of `Pooling.cuts` that a config.json declares."""
    if listed := config.get("matryoshka_dimensions"):
        return tuple(listed)
    return None if config.get("is_matryoshka") else ()


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
