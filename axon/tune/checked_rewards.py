"""Rewards by libraries: JSON that follows a schema, and mathematics that is equal."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from axon.errors import UserError
from axon.tune.rewards import Sampled, installed


@dataclass(frozen=True)
class MatchesSchema:
    """1 if the answer is JSON, spaces at both ends left out, and follows `schema`, a JSON schema of any published
    draft; otherwise 0. By the package jsonschema, of the extra `rewards`."""

    schema: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        try:
            self._validator.check_schema(self.schema)
        except installed("MatchesSchema", "jsonschema").SchemaError as error:
            raise UserError(f"MatchesSchema.schema is no JSON schema: at {error.json_path}, {error.message}") from None

    def __call__(self, sampled: Sampled) -> float:
        try:
            return float(self._validator.is_valid(json.loads(sampled.answer, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            return 0.0

    @cached_property
    def _validator(self) -> Any:
        schemas = installed("MatchesSchema", "jsonschema")
        return schemas.validators.validator_for(self.schema, schemas.Draft202012Validator)(self.schema)


def _refuse(constant: str) -> NoReturn:
    """Refuses the numbers that Python reads beyond JSON's, as NaN."""
    raise ValueError(constant)


@dataclass(frozen=True)
class MathEqual:
    r"""1 if what the answer says at last, in LaTeX, in \boxed{…} or as a number, is equal as mathematics to the right
    answer, as ½ and 0.5, (x + 1)² and x² + 2x + 1, {1, 2} and {2, 1}; otherwise 0. By the package math-verify, of the
    extra `rewards`. Raises `ValueError` for a right answer in which it finds no mathematics.

    Args:
        digits: numbers are compared after so many decimal places.
    """

    digits: int = 6

    def check(self) -> None:
        installed("MathEqual", "math_verify")

    def __call__(self, sampled: Sampled) -> float:
        library = installed("MathEqual", "math_verify")
        expected, actual = (_mathematics(library, text) for text in (sampled.reference, sampled.answer))
        if not expected:
            raise ValueError(f"the right answer has no mathematics: {sampled.reference!r}")
        return float(library.verify(expected, actual, self.digits, timeout_seconds=None))


PROSE = re.compile(r"\$|\\boxed|\\\(|\\\[|(?<![\\a-z])[a-z]{2,}", re.IGNORECASE)
"""What a text has that is not mathematics as a whole: marks around some, or a word."""


def _mathematics(library: Any, text: str) -> list[Any]:
    """What `text` says at last; without the library's time limit, which works in a program's main thread alone."""
    return library.parse(text if PROSE.search(text) else f"${text}$", parsing_timeout=None)
