"""Bindings: the statements of all files merged, by scope, class and field."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from axon.config.files import Statements
from axon.config.grammar import Binding, Macro, Reference
from axon.config.mistakes import Mistake
from axon.config.names import Names, UnknownName
from axon.config.parameters import parameters
from axon.errors import UserError, suggest


class Bindings:
    """The last binding of every (scope, class or function, field), and of every macro.

    `partial`: some statement, file or module could not be read. A missing name may be defined there, so it is not
    reported as a mistake.
    `mistakes` are those found without building anything: unknown names and fields. `unknown`: whether one of them is
    in a reference, so that a part of the tree is missing.
    """

    def __init__(self, statements: Statements, names: Names, partial: bool = False):
        self.partial = partial
        self.mistakes: list[Mistake] = []
        self.unknown = False
        self.macros: dict[str, Binding] = {}
        self._statements, self._names = statements, names
        self._missing: set[str] = set()  # names of modules that are not imported: each is reported once
        self._bound: dict[tuple[str, Any], dict[str, Binding]] = {}
        for binding in statements.bindings:
            self._check_names(binding)
            if binding.field:
                self._bind(binding)
            else:
                self._define(binding)

    def find(self, target: Any, field: str, scope: str) -> Binding | None:
        """The binding that applies in a scope: in `a/b` that of `a/b`, else of `a`, else the one without a scope."""
        parts = scope.split("/") if scope else []
        scopes = ("/".join(parts[:depth]) for depth in range(len(parts), -1, -1))
        return next((found for s in scopes if (found := self._bound.get((s, target), {}).get(field))), None)

    def last(self, bindings: Iterable[Binding]) -> Binding:
        """The one of these that was written last."""
        order = {id(binding): n for n, binding in enumerate(self._statements.bindings)}
        return max(bindings, key=lambda binding: order[id(binding)])

    def origin(self, binding: Binding) -> str:
        """Where a binding's value was written: its place, and those of the macros that it refers to."""
        origin, value = str(binding.place), binding.value
        while isinstance(value, Macro):
            definition = self.macros[value.name]
            origin, value = f"{origin}, %{value.name} {definition.place}", definition.value
        return origin

    def own(self) -> Iterator[tuple[Any, Binding]]:
        """Bindings (class or function, binding) and macros (None, definition) of the main file and of --set."""
        for (_, target), fields in self._bound.items():
            yield from ((target, binding) for binding in fields.values() if self._statements.is_own(binding))
        yield from ((None, macro) for macro in self.macros.values() if self._statements.is_own(macro))

    def unused(self, was_used: Callable[[Binding], bool], built: set[Any]) -> list[Mistake]:
        """A mistake for each binding or macro of the main file or of --set that had no effect.

        An included file may have unused bindings. `built`: the classes and functions in the tree.
        """
        return [
            Mistake(binding.place, f"{binding.key} is never used: {_why_unused(binding, target, built)}")
            for target, binding in self.own()
            if not was_used(binding)
        ]

    def _bind(self, binding: Binding) -> None:
        try:
            target = self._names.find(binding.selector)
            known = parameters(target)
            if binding.field not in known:
                hint = _why_fixed(target, binding.field) or _moved(binding.field) or suggest(binding.field, known)
                raise UserError(f"{binding.selector} has no field {binding.field!r}.{hint}")
        except UserError as error:
            self.unknown = self.unknown or any(True for _ in _parts(binding.value))
            self._note(binding, error, self._path_hint(binding))
        else:
            self._bound.setdefault((binding.scope, target), {})[binding.field] = binding

    def _define(self, macro: Binding) -> None:
        if not macro.scope and self._names.is_known(macro.selector):
            text = (
                f"{macro.key} is a class or function, not a macro: bind one of its fields, {macro.key}.field = value."
            )
            self.mistakes.append(Mistake(macro.place, text))
        else:
            self.macros[macro.key] = macro

    def _check_names(self, binding: Binding) -> None:
        for part in _parts(binding.value):
            try:
                if isinstance(part, Reference):
                    self._names.find(part.name)
            except UserError as error:
                self.unknown = True
                self._note(binding, error)

    def _note(self, binding: Binding, error: UserError, hint: str = "") -> None:
        if isinstance(error, UnknownName) and not error.mistyped:
            if self.partial or error.name in self._missing:
                return
            self._missing.add(error.name)
        self.mistakes.append(Mistake(binding.place, f"{binding.key}: {error}{hint}"))

    def _path_hint(self, binding: Binding) -> str:
        """For `Train.model.layers`: fields are bound by class."""
        owner, _, field = binding.selector.rpartition(".")
        if self._names.is_known(binding.selector) or not self._names.is_known(owner):
            return ""
        return (
            f" A field of the object in {owner}.{field} is bound by that object's class, as in Class.{binding.field}."
        )


def _parts(value: Any) -> Iterator[Reference | Macro]:
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(item)


def _why_fixed(target: Any, field: str) -> str:
    """What a class says of a property, which is no field that can be bound."""
    found = getattr(target, field, None)
    return f" {found.__doc__}" if isinstance(found, property) and found.__doc__ else ""


MOVED = {"exchange": "dispatcher", "margin": "capacity_factor"}
MOVED |= {name: name for name in ("remat", "unroll", "kernels", "host", "disk")}
"""Fields that models, `Layout`, `Train` and `Serve` once had → the name in `Execution`."""


def _moved(field: str) -> str:
    """Where a field went that says how a run is carried out."""
    return f" How a run is carried out is said by Execution.{MOVED[field]}" if field in MOVED else ""


def _why_unused(binding: Binding, target: Any, built: set[Any]) -> str:
    if target is None:
        return f"no used value refers to %{binding.key}."
    if binding.scope:
        return f"no used value refers to @{binding.scope}/{binding.selector}()."
    if target in built:
        return f"every {binding.selector} in the tree has its {binding.field} bound in a scope."
    return f"the tree has no {binding.selector}; a field refers to one as @{binding.selector}()."
