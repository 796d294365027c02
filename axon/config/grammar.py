"""Statements of a gin text: gin-config's parser (gin-config 0.5), with places, and recovering from syntax errors.

Only the grammar is gin-config's (https://github.com/google/gin-config): nothing is registered with it, and
none of its state is used.
"""

import difflib
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gin import config_parser

from axon.config.mistakes import Mistake, Place

_STATEMENT = re.compile(r"(include|import|from)\s|[A-Za-z_][\w./]*\s*[=:]")
_UNQUOTED = re.compile(r"include\s+([^'\"\s]+)")
_NOT_A_LITERAL = re.compile(r"Failed to parse token '(.*)'", re.DOTALL)


@dataclass(frozen=True)
class Reference:
    """`@scope/Name` (the class or function itself) or `@scope/Name()` (what calling it returns)."""

    name: str
    scope: str
    call: bool

    def __repr__(self) -> str:
        return f"@{self.scope}{'/' if self.scope else ''}{self.name}{'()' if self.call else ''}"


@dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Binding:
    """`scope/selector.field = value`; a macro's definition `NAME = value` has no field."""

    place: Place
    scope: str
    selector: str
    field: str
    value: Any

    @property
    def key(self) -> str:
        return "/".join(filter(None, [self.scope, self.selector])) + ("." + self.field if self.field else "")


@dataclass(frozen=True)
class Import:
    """`import module`, `from package import module-or-name`, either one `as alias`."""

    place: Place
    module: str
    is_from: bool
    alias: str | None


@dataclass(frozen=True)
class Include:
    """`include 'path'`."""

    place: Place
    path: str


Statement = Binding | Import | Include
UNREADABLE = (SyntaxError, tokenize.TokenError, RecursionError, UnicodeEncodeError)
"""What the parser raises for a text."""


def parse(text: str, file: str) -> Iterator[Statement | Mistake]:
    """Every statement of `text` in order, and a Mistake for each that cannot be read.

    After a mistake, parsing continues at the next line that looks like the start of a statement.
    """
    lines = re.split("\r\n?|\n", text)  # Python's tokenizer takes no \r alone for a line's end
    begin: int | None = 0
    while begin is not None:
        first, begin = begin + 1, None
        try:
            parser = _Parser("\n" * (first - 1) + "\n".join(lines[first - 1 :]), _References())
            while statement := parser.parse_statement():
                first = parser.line()
                if not isinstance(statement, config_parser.BlockDeclaration):
                    yield _statement(statement, file)
        except UNREADABLE as error:
            mistake, begin = _mistake(error, lines, first, file)
            yield mistake


def _statement(parsed, file: str) -> Statement:
    place = Place(file, parsed.location.line_num)
    if isinstance(parsed, config_parser.IncludeStatement):
        return Include(place, parsed.filename)
    if isinstance(parsed, config_parser.ImportStatement):
        return Import(place, parsed.module, parsed.is_from, parsed.alias)
    return Binding(place, parsed.scope, parsed.selector, parsed.arg_name, parsed.value)


def _mistake(error: Exception, lines: list[str], start: int, file: str):
    """The mistake, and the line (from 0) where parsing continues. The statement begins at `start` (from 1) or
    later."""
    line = error.lineno if isinstance(error, SyntaxError) else start
    line = error.args[1][0] if isinstance(error, tokenize.TokenError) else line
    line = min(line or start, len(lines))
    start = next((n for n in range(start, line) if _STATEMENT.match(lines[n - 1])), line)
    if start < line and _unclosed("\n".join(lines[start - 1 : line - 1])) and _starts_or_ends(lines, line):
        mistake = Mistake(Place(file, start), f"cannot read `{lines[start - 1].strip()}`: a bracket is never closed.")
        return mistake, _next_statement(lines, start)
    source = lines[line - 1].strip()
    unquoted = _UNQUOTED.fullmatch(source)
    why = f"the file's name is quoted: include '{unquoted[1]}'." if unquoted else _reason(error)
    return Mistake(Place(file, line), f"cannot read `{source}`: {why}"), _next_statement(lines, line)


def _unclosed(source: str) -> bool:
    return sum(map(source.count, "([{")) > sum(map(source.count, ")]}"))


def _starts_or_ends(lines: list[str], line: int) -> bool:
    return bool(_STATEMENT.match(lines[line - 1])) or not any(lines[line:])


def _next_statement(lines: list[str], after: int) -> int | None:
    return next((n for n in range(after, len(lines)) if _STATEMENT.match(lines[n])), None)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "lists and dicts are within each other too deep."
    if isinstance(error, UnicodeEncodeError):
        return "it is not valid UTF-8."
    reason = str(error.msg if isinstance(error, SyntaxError) else error.args[0])
    if token := _NOT_A_LITERAL.search(reason):
        word = token[1]
        close = difflib.get_close_matches(word.capitalize(), ["True", "False", "None"], n=1)
        hint = (
            f"Did you mean {close[0]}?" if close else f"Text is quoted ('{word}'), a macro is %{word}, a class @{word}."
        )
        return f"{word!r} is not a value. {hint}"
    return reason[:1].lower() + reason[1:].rstrip(".") + "."


class _References(config_parser.ParserDelegate):
    """Leaves references and macros unresolved: their meaning depends on all of the files."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(name, scope, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


@dataclass(frozen=True, eq=False)
class _Key:
    """A dict's key, compared by identity: otherwise a duplicate key would be overwritten unnoticed."""

    value: Any


class _Parser(config_parser.ConfigParser):
    """gin's parser, but a duplicate or unhashable key of a dict is a syntax error."""

    def line(self) -> int:
        """Where the next token starts, from 1."""
        return self._current_token.start[0] if self._current_token else 1

    def _parse_dict_item(self):
        key, value = super()._parse_dict_item()
        return _Key(key), value

    def _maybe_parse_container(self):
        location = self._current_location()
        success, value = super()._maybe_parse_container()
        return success, self._checked(value, location) if isinstance(value, dict) else value

    def _checked(self, pairs: dict[_Key, Any], location) -> dict:
        checked = {}
        for key, value in pairs.items():
            if not isinstance(key.value, str | int | float | None):
                self._raise_syntax_error(f"{key.value!r} cannot be a dict's key", location)
            if key.value in checked:
                self._raise_syntax_error(f"duplicate key {key.value!r}", location)
            checked[key.value] = value
        return checked
