"""The tokenizer in a folder of the hub's, as ours: which tokens open documents, and which end generation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from axon.checkpoint.huggingface.hub import CONFIG, GENERATION
from axon.data import TokenizerFile
from axon.errors import UserError
from axon.foreign_json import NULL, TEXT, Kind, integer, list_of, read_field, read_json

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ID = integer("[-1, 2**31)")
"""-1 in published files: none."""
IDS = list_of(ID)
TOKEN = TEXT | Kind(
    'an object with a text "content"', lambda one: type(one) is dict and type(one.get("content")) is str
)


def tokenizer_of(folder: Path, path: Path | None = None) -> TokenizerFile:
    """The tokenizer of a model's folder; `path`: of a copy of its tokenizer.json, to name instead.

    Generation ends where that of `transformers` does: at `eos_token_id` of generation_config.json, or of config.json
    where there is none. Raises `UserError` if there is no tokenizer.json.
    """
    file = folder / FILE
    if not file.is_file():
        raise UserError(
            f"{folder} has no {FILE}, which is the only kind of tokenizer that Axon reads. With transformers, "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file} is not a tokenizer that the tokenizers library reads: {error}") from error
    config = read_json(folder / CONFIG)
    generation = _optional(folder / GENERATION)
    stops = _field(folder / (GENERATION if generation else CONFIG), generation or config, "eos_token_id", ID | IDS)
    ends = [stops] if isinstance(stops, int) else stops or []
    tokens = tuple(token for number in ends if (token := _token_of(inner, number)) is not None)
    bos = _opening(folder, inner, config) or (tokens[0] if tokens else None)
    return TokenizerFile(str(path or file), bos, tokens, "template")


def special_id(folder: Path, usual: str, setting: str = "") -> int | None:
    """The id of a token of the tokenizer in a model's folder: that which its settings name, as `mask_token`, else the
    `usual` one; None if there is none."""
    inner = tokenizers.Tokenizer.from_file(str(folder / FILE))
    return inner.token_to_id(_token(folder, setting) or usual)


def _opening(folder: Path, inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> str | None:
    """The token that opens a document, as the tokenizer or the model says it."""
    for setting in ("bos_token", "cls_token"):
        if (named := _token(folder, setting)) is not None and inner.token_to_id(named) is not None:
            return named
    number = _field(folder / CONFIG, config, "bos_token_id", ID)
    return None if number is None else _token_of(inner, number)


def _token_of(inner: tokenizers.Tokenizer, number: int) -> str | None:
    return None if number < 0 else inner.id_to_token(number)


def _token(folder: Path, name: str) -> str | None:
    """The text of a token that the settings of a tokenizer name."""
    found = _field(folder / SETTINGS, _optional(folder / SETTINGS), name, TOKEN)
    return found["content"] if isinstance(found, dict) else found


def _field(path: Path, content: Mapping[str, Any], name: str, kind: Kind) -> Any:
    return read_field(str(path), content, name, kind | NULL, None)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
