"""The tables beside the models, found by an architecture's name, or by one of our configs."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from axon.checkpoint.huggingface.config import FILE, unrepresented
from axon.errors import UserError, suggest
from axon.foreign_json import NULL, TEXT, list_of, read_field, shown
from axon.nn.hugging_face import Architecture

TABLES = "HUGGING_FACE"
"""What a module calls its tables."""


@cache
def known() -> Mapping[str, Architecture]:
    """Those of all modules of `models`, by name."""
    import models

    modules = [importlib.import_module(f"models.{found.name}") for found in pkgutil.iter_modules(models.__path__)]
    return {table.name: table for module in modules for table in getattr(module, TABLES, ())}


def table_of(config: Mapping[str, Any]) -> Architecture:
    """That of a config.json. Raises `UserError` for an architecture that has none."""
    tables, model_type = known(), read_field(FILE, config, "model_type", TEXT | NULL, None)
    names = read_field(FILE, config, "architectures", list_of(TEXT) | NULL, None) or [
        table.name for table in tables.values() if table.model_type == model_type
    ]
    found = next((tables[name] for name in names if name in tables), None)
    if found is not None:
        if model_type not in (None, found.model_type):
            raise UserError(
                f"{FILE}: architectures has {found.name}, whose model_type is {found.model_type!r}, and model_type is "
                f"{model_type!r}; transformers reads the weights by the latter. Correct one of the two"
            )
        return found
    what = f"architectures {shown(names)}" if names else f"model_type {model_type!r}"
    close = suggest(names[0], tables) if names else ""
    known_names = "" if "Known" in close else f" Known: {', '.join(sorted(tables))}."
    raise UserError(f"{FILE}: {what}: Axon has no model of it.{close}{known_names}")


def table_for(model: Any) -> Architecture:
    """That of one of our configs, which can say all of it; of several, the first. Raises `UserError` if none can."""
    tables = getattr(sys.modules[type(model).__module__], TABLES, ())
    why = {table.name: unrepresented(table, model) for table in tables}
    for table in tables:
        if not why[table.name]:
            return table
    kind = f"{type(model).__module__}.{type(model).__name__}"
    if not tables:
        raise UserError(f"{kind} has no Hugging Face table: give its module a `{TABLES}` (axon.nn.hugging_face)")
    lines = [f"  {name}: {'; '.join(lines)}" for name, lines in why.items()]
    raise UserError("\n".join([f"no architecture of Hugging Face's is this {kind}:", *lines]))
