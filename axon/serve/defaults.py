"""Defaults of requests that came with a model: how its generation_config.json draws tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axon.checkpoint.huggingface.hub import GENERATION
from axon.foreign_json import NULL, integer, number, read_field, read_json

FIELDS = {
    "temperature": number("[0, 1e6]"),
    "top_k": integer("[-1, 2**31)"),
    "top_p": number("(0, 1]"),
    "min_p": number("[0, 1]"),
    "repetition_penalty": number("[1e-6, 1e6]"),
}
"""What requests take from the file where they do not say it themselves, as vLLM does. `do_sample` has no effect."""


def sampling_defaults(folder: Path | None) -> Mapping[str, Any]:
    """The `FIELDS` that the generation_config.json in a model's folder has; none without a folder or a file. Raises
    `UserError` for a value that tokens cannot be drawn by."""
    path = folder and folder / GENERATION
    content = read_json(path) if path and path.is_file() else {}
    found = {name: read_field(str(path), content, name, kind | NULL, None) for name, kind in FIELDS.items()}
    return {name: value for name, value in found.items() if value is not None}
