"""Structured output: text that has to be JSON of a schema, match a pattern, or be of a grammar.

By llguidance (https://github.com/guidance-ai/llguidance), which parses the text so far and walks the vocabulary's trie;
a token may come next if the text can still be completed after it, whatever its bytes are part of.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import tokenizers

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.endless import check_pattern, is_endless, patterns_of

LONGEST = 2**18
"""Characters of a schema, pattern or grammar."""
CACHED = 64
"""Grammars that are ready for the next request with the same."""
JSON_STYLE = {"whitespace_pattern": r"[ \t\n\r]{1,64}", "json_allow_general_unicode_escapes": True}
"""Space between the parts of a JSON text has an end, so that no model writes it for ever."""
HEAD = '%llguidance {"no_forcing": true}'
"""Where one text alone can follow, all of its tokenisations are allowed, as elsewhere; not only the usual one."""
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


@dataclass(frozen=True)
class _Vocabulary:
    """`trie`: the library's tokenizer. ends: ids that end a text. valid: bits of the ids that the tokenizer has."""

    trie: Any
    ends: frozenset[int]
    valid: np.ndarray


class Matcher:
    """A `Grammar` of one request: see there. Raises `UserError` where the text becomes too hard to follow."""

    def __init__(self, inner: Any, vocabulary: _Vocabulary, done: bool = False):
        self._inner, self._vocabulary, self._done = inner, vocabulary, done

    def allowed(self) -> np.ndarray:
        valid = self._vocabulary.valid
        if self._done:
            return np.zeros_like(valid)
        words = -(-self._vocabulary.trie.vocab_size // 32)
        bits = np.zeros(max(words, len(valid)), np.uint32)
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, 4 * words)
        self._check()
        return bits[: len(valid)] & valid

    def accept(self, ids: Sequence[int]) -> int:
        for count, token in enumerate(ids):
            if not self._accept(int(token)):
                return count
        return len(ids)

    def copy(self) -> "Matcher":
        return Matcher(self._inner.deep_copy(), self._vocabulary, self._done)

    @property
    def ended(self) -> bool:
        return self._done or self._inner.is_stopped()

    def _accept(self, token: int) -> bool:
        if self._done or not 0 <= token < self._vocabulary.trie.vocab_size:
            return False
        if token in self._vocabulary.ends:
            self._done = self._inner.is_accepting()
            return self._done
        taken = self._inner.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def _check(self) -> None:
        if self._inner.is_error():
            raise UserError(f"The grammar is too complex to follow any further: {_reason(self._inner.get_error())}")


class Grammars:
    """Makes grammars for the ids of a tokenizer.

    Args:
        tokenizer: of the model. vocab: how many ids the model has, if more; those beyond the tokenizer's are never
            allowed.

    Every text may end with any of `tokenizer.ends` where it is complete. Raises `UserError` without the package
    llguidance, or for a tokenizer that it does not read, as one of words.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int | None = None):
        self._library = _library()
        trie = _trie(self._library, tokenizer)
        has = np.zeros(-(-(vocab or tokenizer.vocab) // 32) * 32, bool)
        has[: min(tokenizer.vocab, vocab or tokenizer.vocab)] = True
        valid = np.packbits(has, bitorder="little").view(np.uint32)
        self._vocabulary = _Vocabulary(trie, tokenizer.ends, valid)
        self._limits = self._library.LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
        added = json.loads(tokenizer.to_json())["added_tokens"]
        self._special = {token["content"]: token["id"] for token in added if trie.is_special_token(token["id"])}
        self._ready = lru_cache(CACHED)(self._compile)

    def json_schema(self, schema: Mapping[str, Any]) -> Matcher:
        """JSON of a schema (draft 2020-12, as far as the library goes), properties in the order in which it has them.

        Raises `UserError` for a schema that nothing meets, or only what has no end, or that uses a keyword which cannot
        be enforced.
        """
        _check_length(_dumped(schema), "The JSON schema")
        return self._matcher("The JSON schema", f"start: {self.embedded(schema)}")

    def json_object(self) -> Matcher:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Matcher:
        r"""A whole match of a regular expression in Rust's syntax: no look-around or back-references; `\d` is 0-9."""
        _check_length(pattern, "The regular expression")
        check_pattern(pattern, "The regular expression")
        literal = self._library.regex_to_lark(pattern, "d")
        return self._matcher("The regular expression", f"start: /{literal}/")

    def lark(self, text: str) -> Matcher:
        """A context-free grammar in llguidance's dialect of Lark; the rule `start` is the whole.

        One all of whose texts are without end, as `start: "a" start`, is not found out: its text ends by its length.
        """
        _check_length(text, "The grammar")
        check_pattern(text, "The grammar")
        return self._matcher("The grammar", text)

    def choices(self, texts: Sequence[str]) -> Matcher:
        """One of these texts."""
        if not texts:
            raise UserError("There are no choices; give at least one text")
        alternatives = "start: " + " | ".join(json.dumps(text) for text in texts)
        _check_length(alternatives, "The choices")
        return self._matcher("The choices", alternatives)

    def embedded(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema, for a rule of `lark`. Raises as `json_schema`, as far as it is found out before the rule is
        compiled."""
        text = _dumped({**schema, "x-guidance": JSON_STYLE})
        _check_schema(schema)
        return f"%json {text}"

    def literal(self, text: str) -> str:
        """`text`, for a rule of `lark`: the token that is spelled so, if there is one which is no text to the library:
        a special one, or one such as `<tool_call>`."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)

    def _matcher(self, what: str, grammar: str) -> Matcher:
        ready, error = self._ready(grammar)
        if error:
            raise UserError(f"{what} cannot be used: {error}")
        return Matcher(ready.deep_copy(), self._vocabulary)

    def _compile(self, grammar: str) -> tuple[Any, str]:
        """The library's matcher, and what is wrong with it: it is asked for its first mask, too."""
        grammar = self._library.LLMatcher.grammar_from_lark(f"{HEAD}\n{grammar}")
        inner = self._library.LLMatcher(self._vocabulary.trie, grammar, log_level=0, limits=self._limits)
        if inner.is_error():
            return inner, _reason(inner.get_error())
        inner.compute_bitmask()
        if not inner.is_error():
            return inner, ""
        error = _reason(inner.get_error())
        return inner, "no text meets it" if error == "NoExtensionBias" else error


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise UserError(
            f"Structured output needs the package llguidance, which cannot be imported ({error}): run "
            "scripts/setup serve"
        ) from error
    return llguidance


def _trie(library: ModuleType, tokenizer: Tokenizer) -> Any:
    """The library's tokenizer; one without ends is given one more id, since the library needs an end."""
    text, ends = tokenizer.to_json(), sorted(tokenizer.ends)
    if not ends:
        inner = tokenizers.Tokenizer.from_str(text)
        inner.add_special_tokens(["\ue000the end of a text\ue001"])
        text, ends = inner.to_str(), [tokenizer.vocab]
    try:
        return library.LLTokenizer(text, eos_token=ends)
    except ValueError as error:
        raise UserError(f"Structured output is unavailable with this tokenizer: {error}") from error


def _check_length(text: str, what: str) -> None:
    if len(text) > LONGEST:
        raise UserError(f"{what} has {len(text):,} characters; at most {LONGEST:,} are allowed")


def _check_schema(schema: Any) -> None:
    try:
        for pattern in patterns_of(schema):
            check_pattern(pattern, "The JSON schema's pattern")
        endless = is_endless(schema)
    except RecursionError as error:
        raise UserError("The JSON schema is nested too deeply") from error
    if endless:
        raise UserError(
            "The JSON schema cannot be used: no text meets it, for it requires itself within itself without end; leave "
            "such a property out of `required`, or allow null in its place"
        )


def _dumped(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise UserError(f"The JSON schema is a {type(schema).__name__}; expected an object, as {{}} for any JSON")
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"The JSON schema is not JSON: {error}") from error


def _reason(error: str) -> str:
    """What the library says is wrong, in one line: of a regular expression's drawing the last line."""
    lines = [line.strip() for line in error.splitlines()] or [""]
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return _PLACE.sub("", said).removesuffix("<non-verbose/>").strip()
