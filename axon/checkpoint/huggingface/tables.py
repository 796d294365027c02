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
from axon.nn.hugging_face import INSIDE, Architecture, HeadTable

TABLES, HEADS = "HUGGING_FACE", "HUGGING_FACE_HEADS"
"""The names under which a module has its tables, and those of heads on any language model."""

ENTRY_POINTS = "axon.models"
"""The group of entry points by which an installed package names modules that have tables."""


def known() -> Mapping[str, Architecture]:
    """Architecture's name → its table: of all modules of `models`, of those that installed packages name, and of those
    that are imported, as a person's own by a config file, which come before the others."""
    return {table.name: table for table in _declared(TABLES, len(sys.modules))}


def known_heads() -> tuple[HeadTable, ...]:
    """The tables of heads, of the same modules."""
    return _declared(HEADS, len(sys.modules))


@cache
def _declared(attribute: str, modules: int) -> tuple[Any, ...]:
    """The tables that all modules have under this name. `modules`: how many are imported; more may have such."""
    import models

    names = [f"{models.__name__}.{module.name}" for module in pkgutil.iter_modules(models.__path__)]
    listed = [*map(importlib.import_module, names), *_installed()]
    imported = [module for module in sys.modules.copy().values() if module not in listed]
    found = (vars(module).get(attribute) for module in (*listed, *imported) if module is not None)
    return tuple(table for tables in found if isinstance(tables, tuple | list) for table in tables)


@cache
def _installed() -> tuple[ModuleType, ...]:
    return tuple(one.load() for one in entry_points(group=ENTRY_POINTS))


def table_of(config: Mapping[str, Any]) -> Architecture:
    """The table for a config.json. Raises `UserError` for an architecture that has none."""
    tables, model_type = known(), read_field(FILE, config, "model_type", TEXT | NULL, None)
    names = read_field(FILE, config, "architectures", list_of(TEXT) | NULL, None) or [
        table.name for table in tables.values() if table.model_type == model_type
    ]
    found = next((one for name in names if (one := tables.get(name) or _with_head(name, config))), None)
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


def _with_head(name: str, config: Mapping[str, Any]) -> Architecture | None:
    """The table of a family's language model with another head, for an architecture of this name."""
    families = [family for family in known().values() for head in known_heads() if head.name(family) == name]
    fitting = (head.around(families[0]) for head in known_heads() if families and head.fits(config))
    return next(fitting, None)


def _tables_of(model: Any) -> list[Architecture]:
    """The tables beside the class of a config, of one with a head those of what it is around."""
    own = [*getattr(sys.modules[type(model).__module__], TABLES, ())]
    heads = [head for head in known_heads() if type(model) is head.model]
    families = _tables_of(getattr(model, INSIDE)) if heads else []
    return own + [table for head in heads for family in families if (table := head.around(family)) is not None]


def table_for(model: Any) -> Architecture:
    """The table that can say all of a model's config; of several, the first. Raises `UserError` if none can."""
    tables = _tables_of(model)
    why = {table.name: unrepresented(table, model) for table in tables}
    for table in tables:
        if not why[table.name]:
            return table
    kind = f"{type(model).__module__}.{type(model).__name__}"
    if not tables:
        raise UserError(f"{kind} has no Hugging Face table: give its module a `{TABLES}` (axon.nn.hugging_face)")
    lines = [f"  {name}: {'; '.join(lines)}" for name, lines in why.items()]
    raise UserError("\n".join([f"no architecture of Hugging Face's is this {kind}:", *lines]))
