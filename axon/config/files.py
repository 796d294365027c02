"""All statements of a configuration: a file, what it includes, and the command line's overrides."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from axon.config.grammar import Binding, Import, Include, parse
from axon.config.mistakes import Mistake, Place
from axon.disk import expanded, reason
from axon.errors import UserError, suggest

OVERRIDE = Place("--set")
DEEPEST = 100
"""Files that include each other in a chain, at most."""


@dataclass
class Statements:
    """All statements, in order of effect; `main` is the file that was given, `plan` the one that is laid over it."""

    main: str
    plan: str | None = None
    bindings: list[Binding] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

    def is_own(self, binding: Binding) -> bool:
        """Whether it was written for this run: in the main file, in the plan or with `--set`."""
        return binding.place.file in (self.main, self.plan, OVERRIDE.file)


def read(path: str | Path, overrides: Sequence[str] = (), plan: Path | None = None) -> Statements:
    """The statements of the file at `path`, of what it includes (each in its place), of the file `plan`, and of the
    overrides, last."""
    statements = Statements(shown(Path(path)), None if plan is None else shown(plan))
    _read_file(Path(path), Place(statements.main), (), statements)
    if plan is not None:
        _read_file(plan, Place(f"--plan {shown(plan)}"), (), statements)
    for override in overrides:
        _read_override(override, statements)
    return statements


def _read_file(path: Path, place: Place, inside: tuple[Path, ...], into: Statements) -> None:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path
        into.mistakes.append(Mistake(place, _unreadable(path, error)))
        return
    for statement in parse(text, shown(path)):
        if isinstance(statement, Mistake):
            into.mistakes.append(statement)
        elif isinstance(statement, Include):
            _include(statement, path, (*inside, path.resolve()), into)
        elif isinstance(statement, Import):
            into.imports.append(statement)
        else:
            into.bindings.append(statement)


def _include(statement: Include, including: Path, inside: tuple[Path, ...], into: Statements) -> None:
    try:
        named = Path(expanded(statement.path, "include"))
    except UserError as error:
        into.mistakes.append(Mistake(statement.place, str(error)))
        return
    candidates = [including.parent / named, named]
    found = next((candidate for candidate in candidates if os.path.exists(candidate)), None)
    if found is None:
        text = f"there is no file {statement.path!r}, neither next to {shown(including)} nor in the working directory."
        into.mistakes.append(Mistake(statement.place, text + _similar_file(candidates[0])))
    elif found.resolve() in inside:
        chain = [*inside[inside.index(found.resolve()) :], found.resolve()]
        text = f"circular include: {' → '.join(shown(path) for path in chain)}."
        into.mistakes.append(Mistake(statement.place, text))
    elif len(inside) > DEEPEST:
        text = f"{statement.path!r} is not read: includes are more than {DEEPEST} deep within each other."
        into.mistakes.append(Mistake(statement.place, text))
    else:
        _read_file(found, statement.place, inside, into)


def _read_override(text: str, into: Statements) -> None:
    read = list(parse(text, OVERRIDE.file))
    if len(read) == 1 and isinstance(read[0], Binding):
        binding = read[0]
        into.bindings.append(Binding(OVERRIDE, binding.scope, binding.selector, binding.field, binding.value))
        return
    reasons = [statement.text for statement in read if isinstance(statement, Mistake)]
    reason = reasons[0] if reasons else f"`{text}` is not a single binding."
    into.mistakes.append(Mistake(OVERRIDE, f'{reason} Write --set "Name.field=value", strings in quotes.'))


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file {str(path)!r}.{_similar_file(path)}"
    return f"{str(path)!r} cannot be read: {reason(error)}."


def _similar_file(path: Path) -> str:
    there = [found.name for found in path.parent.glob("*.gin")] if path.parent.is_dir() else []
    return suggest(path.name, there)


def shown(path: Path) -> str:
    """Relative to the working directory if the file lies below it, else absolute."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else path)
