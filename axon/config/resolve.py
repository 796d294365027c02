"""From bindings to one tree of frozen dataclasses, collecting every mistake."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from axon.config.bindings import Bindings
from axon.config.grammar import Binding, Macro, Reference
from axon.config.mistakes import ConfigError, Mistake, Place
from axon.config.names import Names
from axon.config.parameters import Parameter, is_frozen, parameters
from axon.config.types import Mismatch, describe, fit
from axon.errors import UserError, suggest
from axon.fields import field_values

DEFAULT = "default"
_REQUIRED = ("REQUIRED", "gin.REQUIRED")
_FAILED = object()  # a value whose mistake is recorded
DEEPEST = 200
"""Macros, objects, lists and dicts within each other, at most: Python's own stack is not much deeper."""
MOST = 100_000
"""Values of a tree, at most: forty macros that each name the next one twice would be 2**40."""


@dataclass(frozen=True)
class _Site:
    """Where a value is built: its place in the files, the current scope, its path in the tree, and the names that are
    being resolved, outermost first (`@Train()`, `Train.model`, `%MODEL`), to detect cycles; `origin`: of what is not
    bound there."""

    place: Place
    scope: str = ""
    path: str = ""
    inside: tuple[str, ...] = ()
    depth: int = 0
    origin: str = DEFAULT

    def at(self, suffix: str) -> "_Site":
        return dataclasses.replace(self, path=f"{self.path}{suffix}".removeprefix("."), depth=self.depth + 1)

    def enter(self, place: Place, name: str) -> "_Site":
        return dataclasses.replace(self, place=place, inside=(*self.inside, name), depth=self.depth + 1)

    def cycle(self, name: str) -> str:
        """`@A() → A.b → @A()` if `name` is already being resolved, else an empty text."""
        return " → ".join([*self.inside[self.inside.index(name) :], name]) if name in self.inside else ""


class Resolver:
    """Builds the tree. After `build`, `mistakes` has those found, `origins` where the value at each path of the tree
    (`model.layers`) was written, and `whole` whether every part of the tree was reached; after `finish`, `unused` has
    the bindings without effect."""

    def __init__(self, bindings: Bindings, names: Names):
        self.mistakes: list[Mistake] = []
        self.unused: list[Mistake] = []
        self.origins: dict[str, str] = {}
        self.whole = not (bindings.unknown or bindings.partial)
        self._bindings, self._names = bindings, names
        self._used: set[int] = set()  # ids: a binding may hold values that cannot be hashed
        self._built: set[Any] = set()
        self._count = 0

    def build(self, root: str, main: Place) -> Any:
        """The tree of `@root()`; meaningless if there are mistakes."""
        try:
            self._names.find(root)
        except UserError as error:
            self._fail(main, str(error))
        return self._make(Reference(root, "", True), _Site(main))

    def finish(self) -> None:
        """Collect bindings without effect; or, if a part of the tree is missing, mistakes in bindings of that part."""
        if self.whole:
            self.unused = self._bindings.unused(self._is_used, self._built)
            return
        for target, binding in list(self._bindings.own()):
            if target is not None and not self._is_used(binding):
                hint = parameters(target)[binding.field].hint
                self._bound(binding, target, hint, _Site(binding.place, binding.scope))

    def _is_used(self, binding: Binding) -> bool:
        return id(binding) in self._used

    # Values

    def _value(self, value: Any, site: _Site) -> Any:
        self._check_size(site)
        if isinstance(value, Macro):
            return self._expand(value, site)
        if isinstance(value, Reference):
            return self._make(value, site) if value.call else self._named(value)
        if isinstance(value, Mapping):
            items = {key: self._value(item, site.at(f"[{key!r}]")) for key, item in value.items()}
            return _FAILED if _any_failed(items.values()) else items
        if isinstance(value, list | tuple):
            items = [self._value(item, site.at(f"[{n}]")) for n, item in enumerate(value)]
            return _FAILED if _any_failed(items) else type(value)(items)
        return value

    def _check_size(self, site: _Site) -> None:
        """Raise `ConfigError` where values are within too many others, or are too many."""
        self._count += 1
        if site.depth > DEEPEST:
            text = f"macros, objects, lists and dicts are more than {DEEPEST} deep within each other."
            raise ConfigError([Mistake(site.place, text)])
        if self._count > MOST:
            raise ConfigError([Mistake(site.place, f"the configuration has more than {MOST:,} values.")])

    def _expand(self, macro: Macro, site: _Site) -> Any:
        definition = self._bindings.macros.get(macro.name)
        if definition is None:
            return self._absent(site.place, self._undefined(macro, site))
        if cycle := site.cycle(repr(macro)):
            return self._fail(site.place, f"circular macro: {cycle}.")
        self._used.add(id(definition))
        return self._value(definition.value, site.enter(definition.place, repr(macro)))

    def _undefined(self, macro: Macro, site: _Site) -> str:
        key = site.inside[-1].removeprefix("%")
        if macro.name in _REQUIRED:
            return f"{key} is REQUIRED: give it a value in a file that includes this one, or with --set {key}=…"
        return f"{key}: undefined macro %{macro.name}.{suggest(macro.name, self._bindings.macros)}"

    def _named(self, reference: Reference) -> Any:
        try:
            return self._names.find(reference.name)
        except UserError:  # recorded with its statement
            return _FAILED

    # Objects

    def _make(self, reference: Reference, site: _Site) -> Any:
        """The object of `@scope/Name()`; without a scope of its own, in the current one. To what a function returns,
        bindings of its class apply as to a default."""
        site = dataclasses.replace(site, scope=reference.scope or site.scope, origin=DEFAULT)
        name = repr(dataclasses.replace(reference, scope=site.scope))
        if cycle := site.cycle(name):
            return self._fail(site.place, f"circular reference: {cycle}.")
        if (target := self._named(reference)) is _FAILED:
            return _FAILED
        try:
            accepted = parameters(target)
        except UserError as error:
            self.whole = False
            return self._fail(site.place, str(error))
        inner = site.enter(site.place, name)
        values = {name: self._field(target, name, parameter, inner) for name, parameter in accepted.items()}
        made = self._call(target, values, target, site)
        if made is _FAILED or inspect.isclass(target):
            return made
        return self._default(made, dataclasses.replace(inner, origin=f"{target.__name__}()"))

    def _field(self, target: Any, name: str, parameter: Parameter, site: _Site) -> Any:
        inner = site.at(f".{name}")
        if binding := self._bindings.find(target, name, site.scope):
            return self._bound(binding, target, parameter.hint, inner)
        if parameter.default:
            self.origins[inner.path] = inner.origin
            return self._default(parameter.default(), inner)
        key = f"{target.__name__}.{name}"
        return self._absent(
            site.place, f"{key} ({describe(parameter.hint)}) has no value and no default: write {key} = …"
        )

    def _bound(self, binding: Binding, target: Any, hint: Any, site: _Site) -> Any:
        self._used.add(id(binding))
        value = self._value(binding.value, site.enter(binding.place, binding.key))
        if value is _FAILED:
            return _FAILED
        self.origins[site.path] = self._bindings.origin(binding)
        try:
            return fit(value, hint)
        except Mismatch as mismatch:
            self.whole = self.whole and not inspect.isclass(value)
            return self._fail(binding.place, f"{target.__name__}.{binding.field}{mismatch.at}: {mismatch}")

    def _default(self, value: Any, site: _Site) -> Any:
        """A default, with the bindings of the classes of the objects in it applied."""
        if type(value) is tuple:
            items = [self._default(item, site.at(f"[{n}]")) for n, item in enumerate(value)]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else _FAILED if _any_failed(items) else tuple(items)
        if inspect.isclass(value) or not is_frozen(value):
            return value
        of_class = parameters(type(value))
        olds, values = field_values(value, of_class), {}
        for name, old in olds.items():
            parameter = dataclasses.replace(of_class[name], default=lambda old=old: old)
            values[name] = self._field(type(value), name, parameter, site)
        changed = {name: new for name, new in values.items() if new is not olds[name]}
        make = functools.partial(dataclasses.replace, value) if changed else lambda: value
        return self._call(make, changed, type(value), site)

    def _call(self, make: Callable, values: dict[str, Any], target: Any, site: _Site) -> Any:
        self._built.add(target)
        if _any_failed(values.values()):
            return _FAILED
        try:
            return make(**values)
        except (UserError, ValueError, TypeError, ArithmeticError, AssertionError) as error:
            text = str(error) or type(error).__name__
            named = re.search(rf"\b{target.__name__}\b", text)
            return self._fail(self._place_of(target, text, site), text if named else f"{target.__name__}: {text}")

    def _place_of(self, target: Any, message: str, site: _Site) -> Place:
        """The place of an object's own error: the last binding of a field that it names, else of any field."""
        found = [self._bindings.find(target, name, site.scope) for name in parameters(target)]
        bound = [binding for binding in found if binding]
        named = [binding for binding in bound if re.search(rf"\b{binding.field}\b", message)]
        return self._bindings.last(named or bound).place if bound else site.place

    def _absent(self, place: Place, text: str) -> Any:
        """Something is missing: a mistake, unless it may be in a file or statement that could not be read."""
        self.whole = False
        return _FAILED if self._bindings.partial else self._fail(place, text)

    def _fail(self, place: Place, text: str) -> Any:
        self.mistakes.append(Mistake(place, text))
        return _FAILED


def _any_failed(values) -> bool:
    return any(value is _FAILED for value in values)
