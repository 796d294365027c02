"""The names a configuration may use: those of Axon's own modules and of the modules it imports."""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import models
from axon.config.grammar import Import
from axon.config.mistakes import Mistake
from axon.errors import UserError, suggest


class UnknownName(UserError):
    """No known module has the name; `mistyped`: one has a similar name."""

    def __init__(self, name: str, known: Iterable[str]):
        hint = suggest(name, known)
        self.name, self.mistyped = name, "Did you mean" in hint
        if not self.mistyped:
            hint = "" if "." in name else f" Import it above: from {_model_with(name) or 'MODULE'} import {name}"
        super().__init__(f"unknown name {name!r}.{hint}")


class Names:
    """Full name (`models.llama.Llama`) → class or function; any ending of a full name (`Llama`) finds it."""

    def __init__(self, modules: Iterable[str]):
        self._full: dict[str, Any] = {}
        for module in modules:
            self._add(module, importlib.import_module(module))

    def import_all(self, imports: Iterable[Import]) -> list[Mistake]:
        """Import these names. The working directory can be imported from."""
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)
        importlib.invalidate_caches()
        mistakes = []
        for statement in imports:
            try:
                self._import(statement)
            except UserError as error:
                mistakes.append(Mistake(statement.place, str(error)))
        return mistakes

    def find(self, name: str) -> Any:
        """The class or function of that name; UnknownName if none, UserError if more than one has it."""
        if name in self._full:
            return self._full[name]
        found = {full: target for full, target in self._full.items() if full.endswith("." + name)}
        if not found:
            raise UnknownName(name, self.known())
        first, *others = found.values()
        if any(other is not first for other in others):
            raise UserError(f"{name!r} is ambiguous: write {' or '.join(sorted(found))}.")
        return first

    def is_known(self, name: str) -> bool:
        return any(full == name or full.endswith("." + name) for full in self._full)

    def short_name(self, target: Any) -> str | None:
        """The bare name of this class or function, if it is unambiguous."""
        named = {full.rpartition(".")[2] for full, known in self._full.items() if known is target}
        return next((name for name in sorted(named) if not self._others(name, target)), None)

    def known(self) -> set[str]:
        return {full.rpartition(".")[2] for full in self._full}

    def _others(self, name: str, target: Any) -> bool:
        return any(known is not target for full, known in self._full.items() if full.rpartition(".")[2] == name)

    def _import(self, statement: Import) -> None:
        package, _, name = statement.module.rpartition(".")
        if not statement.is_from:
            self._add(statement.alias or statement.module, _import_module(statement.module))
            return
        parent = _import_module(package)
        target = getattr(parent, name, None)
        if target is None and hasattr(parent, "__path__"):
            target = _import_module(statement.module)
        if isinstance(target, ModuleType):
            self._add(statement.alias or statement.module, target)
        elif inspect.isclass(target) or inspect.isfunction(target):
            self._full[statement.alias or statement.module] = target
        else:
            known = (public for public, _ in _public(parent))
            raise UserError(f"{package!r} has no class or function {name!r}.{suggest(name, known)}")

    def _add(self, prefix: str, module: ModuleType) -> None:
        self._full.update({f"{prefix}.{name}": target for name, target in _public(module)})


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """A module's public names: its `__all__`, else every public dataclass in it and everything it defines itself."""
    listed = getattr(module, "__all__", None)
    try:
        offered = vars(module).items() if listed is None else [(name, getattr(module, name)) for name in listed]
    except (TypeError, AttributeError) as error:
        raise UserError(f"__all__ of {module.__name__!r} is not a list of what it defines: {error}.") from error
    for name, target in offered:
        if not (inspect.isclass(target) or inspect.isfunction(target)):
            continue
        own = f"{target.__module__}.".startswith(f"{module.__name__}.") or dataclasses.is_dataclass(target)
        if listed is not None or (own and not name.startswith("_")):
            yield name, target


def _model_with(name: str) -> str | None:
    """The module of our own model families that has this name."""
    families = (f"models.{found.name}" for found in pkgutil.iter_modules(models.__path__))
    return next((family for family in families if name in _import_module(family).__all__), None)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            places = f"neither installed nor in the working directory ({Path.cwd()})"
            raise UserError(f"there is no module {error.name!r}: {places}.") from None
        raise UserError(_import_failed(name, error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's own module runs here, and may raise anything, or exit
        raise UserError(_import_failed(name, error)) from error


def _import_failed(name: str, error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (frame.filename, frame.lineno)
    return f"importing {name!r} failed at {file}:{line}: {type(error).__name__}: {error}"
