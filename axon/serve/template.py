"""Chat templates: Jinja in a sandbox, with what `transformers` gives them, and an end to their time and size."""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from threading import local
from typing import Any, ClassVar

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from axon.errors import UserError

SECONDS = 5.0
"""Of one rendering."""
MARKS = ("generation_begin", "generation_end")
"""Variables that a template writes, where they are given, before and after what an assistant writes."""
LONGEST = 2**24
"""Characters of what is rendered."""


class Template:
    """A template's source, compiled. Raises `UserError`, which names `where` it is from, for a syntax error.

    Attributes:
        variables: names that it reads, of what it is rendered with. marks_turns: whether it says what an assistant
            writes, by `{% generation %}`: then that is between the texts `MARKS`, if it is rendered with these names.
    """

    def __init__(self, source: str, where: str):
        self.source, self._where, self._sandbox = source, where, _Sandbox()
        try:
            self._compiled = self._sandbox.from_string(source)
            names = meta.find_undeclared_variables(self._sandbox.parse(source)) - set(self._sandbox.globals)
            self.variables, self.marks_turns = names - {*MARKS}, names >= {*MARKS}
        except TemplateSyntaxError as error:
            raise UserError(f"{where}: the chat template's line {error.lineno} is wrong: {error.message}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; raises `UserError` with the template's own message where it refuses the messages."""
        self._sandbox.begin()
        parts, size = [], 0
        try:
            for part in self._compiled.generate(variables):
                parts.append(part)
                self._sandbox.check_size(size := size + len(part))
        except _Refused as error:
            raise UserError(f"The chat template does not take these messages: {error.message}") from error
        except (UserError, MemoryError):
            raise
        except Exception as error:  # whatever the template's expressions raise for these messages
            raise UserError(f"{self._where}: the chat template failed with these messages: {error}") from error
        return "".join(parts)


class _Refused(TemplateError):
    """What the template itself says is wrong."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Looks at the clock wherever a template calls or reads something."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._until = local()

    def begin(self) -> None:
        self._until.time = time.monotonic() + SECONDS

    def check_size(self, size: int) -> None:
        self._tick()
        if size > LONGEST:
            raise UserError(f"The chat template makes more than {LONGEST:,} characters of these messages")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._tick()
        return super().getitem(obj, argument)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._tick()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > LONGEST:
            raise TemplateError(f"{left!r:.20} {operator} {right!r:.20} is too large")
        return super().call_binop(context, operator, left, right)

    def _tick(self) -> None:
        if time.monotonic() > getattr(self._until, "time", float("inf")):
            raise UserError(f"The chat template takes longer than {SECONDS:g} s for these messages")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, by which a template marks what an assistant writes: `MARKS` around it."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        begin, end = (nodes.Output([nodes.Name(mark, "load")], lineno=line) for mark in MARKS)
        return [begin, *parser.parse_statements(("name:endgeneration",), drop_needle=True), end]


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own would escape <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
