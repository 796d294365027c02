"""The tokenizer in a folder of the hub's, as ours: which tokens open documents, and which end generation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from axon.checkpoint.huggingface.hub import CONFIG, GENERATION
from axon.checkpoint.huggingface.model import read_json
from axon.data import TokenizerFile
from axon.errors import UserError

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


def tokenizer_of(folder: Path, path: Path | None = None) -> TokenizerFile:
    """That of a model's folder; `path`: of a copy of its tokenizer.json, to name instead.

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
    config, settings = read_json(folder / CONFIG), _optional(folder / SETTINGS)
    generation = _optional(folder / GENERATION) or config
    stops = generation.get("eos_token_id")
    ends = [stops] if isinstance(stops, int) else stops or []
    tokens = tuple(token for number in ends if (token := inner.id_to_token(number)) is not None)
    bos = _opening(inner, config, settings) or (tokens[0] if tokens else None)
    return TokenizerFile(str(path or file), bos, tokens, "template")


def special_id(folder: Path, usual: str, setting: str = "") -> int | None:
    """The id of a token of the tokenizer in a model's folder: that which its settings name, as `mask_token`, else the
    `usual` one; None if there is none."""
    inner = tokenizers.Tokenizer.from_file(str(folder / FILE))
    return inner.token_to_id(_token(_optional(folder / SETTINGS), setting) or usual)


def _opening(inner: tokenizers.Tokenizer, config: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """The token that opens a document, as the tokenizer or the model says it."""
    for setting in ("bos_token", "cls_token"):
        if (named := _token(settings, setting)) is not None and inner.token_to_id(named) is not None:
            return named
    number = config.get("bos_token_id")
    return inner.id_to_token(number) if isinstance(number, int) else None


def _token(settings: Mapping[str, Any], name: str) -> str | None:
    found = settings.get(name)
    return found.get("content") if isinstance(found, dict) else found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
