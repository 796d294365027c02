"""The parameters of a class or function that a configuration names."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axon.errors import UserError


@dataclass(frozen=True)
class Parameter:
    """A dataclass's field or a function's argument: its annotation, and a factory of its default if it has one."""

    hint: Any
    default: Callable[[], Any] | None


def parameters(target: Any) -> dict[str, Parameter]:
    """Parameters of a frozen dataclass or a function; UserError if it is neither, or its annotations are invalid."""
    name = target.__name__
    if inspect.isclass(target) and not is_frozen(target):
        raise UserError(f"{name} is not a frozen dataclass: put @dataclass(frozen=True) above it.")
    try:
        hints = typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError) as error:
        raise UserError(f"the annotations of {name} cannot be read: {error}.") from error
    if dataclasses.is_dataclass(target):
        fields = [field for field in dataclasses.fields(target) if field.init]
        return {field.name: Parameter(hints.get(field.name, Any), _field_default(field)) for field in fields}
    signature = inspect.signature(target).parameters.values()
    named = [p for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: Parameter(hints.get(p.name, Any), _argument_default(p)) for p in named}


def is_frozen(target: Any) -> bool:
    """Whether a class, or an instance's class, is a frozen dataclass."""
    return dataclasses.is_dataclass(target) and target.__dataclass_params__.frozen  # pyright: ignore


def _field_default(field: dataclasses.Field) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None if field.default is dataclasses.MISSING else lambda: field.default


def _argument_default(argument: inspect.Parameter) -> Callable[[], Any] | None:
    return None if argument.default is argument.empty else lambda: argument.default
