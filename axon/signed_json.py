"""JSON objects that hold a checksum of their own text, so that any changed character of a file is noticed."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

_BEFORE = ', "crc32": "'


def signed(value: Mapping[str, Any], indent: int | None = None) -> str:
    """`value`, which is not empty, as JSON; its last member is the CRC-32 of the text before it."""
    text = json.dumps(value, indent=indent).removesuffix("}").rstrip()
    return text + _ending(text)


def unsigned(text: str) -> dict[str, Any]:
    """The text that was `signed`. Raises `ValueError` if any character of it is another."""
    body = text.rpartition(_BEFORE)[0]
    if text != body + _ending(body):
        raise ValueError("its own checksum does not match")
    return json.loads(body + "}")


def _ending(text: str) -> str:
    return f'{_BEFORE}{zlib.crc32(text.encode()):08x}"}}\n'
