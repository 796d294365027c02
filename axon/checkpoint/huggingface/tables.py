"""The Hugging Face tables beside the models, found by an architecture's name, or by a model's config."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from axon.checkpoint.huggingface.config import FILE, unrepresented
from axon.errors import UserError, suggest
from axon.foreign_json import NULL, TEXT, list_of, read_field, shown
from axon.nn.hugging_face import Architecture

TABLES = "HUGGING_FACE"
"""What a module calls its tables."""

ENTRY_POINTS = "axon.models"
"""The group of entry points by which an installed package names modules that have tables."""


def known() -> Mapping[str, Architecture]:
    """Architecture's name → its table: of all modules of `models`, of those that installed packages name, and of those
    that are imported, as a person's own by a config file, which come before the others."""
    return _known(len(sys.modules))


@cache
def _known(modules: int) -> Mapping[str, Architecture]:
    """`modules`: how many are imported; more may have tables."""
    import models

    names = [f"{models.__name__}.{module.name}" for module in pkgutil.iter_modules(models.__path__)]
    listed = [*map(importlib.import_module, names), *_installed()]
    imported = [module for module in sys.modules.copy().values() if module not in listed]
    found = (vars(module).get(TABLES) for module in (*listed, *imported) if module is not None)
    return {table.name: table for tables in found if isinstance(tables, tuple | list) for table in tables}


@cache
def _installed() -> tuple[ModuleType, ...]:
    return tuple(one.load() for one in entry_points(group=ENTRY_POINTS))


def table_of(config: Mapping[str, Any]) -> Architecture:
    """The table for a config.json. Raises `UserError` for an architecture that has none."""
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
    raise UserError(
        f"{FILE}: {what}: Axon has no model of it.{close}{known_names} A model of your own brings its table: {TABLES} "
        f"in its module, which a config file imports or an installed package names as an entry point, {ENTRY_POINTS!r}"
    )


def table_for(model: Any) -> Architecture:
    """The table that can say all of a model's config; of several, the first. Raises `UserError` if none can."""
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
