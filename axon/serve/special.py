"""What people write stays text: of a chat, the template alone writes special tokens.

A text such as `<|im_end|>` in a message would otherwise end it, and what follows would be anybody's. So before the
template is rendered, the first character of whatever may begin a special token in a message is replaced by a private
character, one that the messages do not have; then what still reads as a special token is the template's. The template
may trim, cut, join or quote what it is given as it likes.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from axon.data.literal import literal
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError

_PRIVATE = range(0xF0000, 0xFFFFE)
_BRACKETS = re.compile(r"(?s)<.+>|\[.+\]")


@dataclass(frozen=True)
class Hiding:
    """For one chat. private: a special token's first character → what stands for it. strict, lenient: where it does."""

    private: Mapping[str, str]
    strict: re.Pattern
    lenient: re.Pattern

    def hide(self, tree: Any, strict: bool = True) -> Any:
        """`tree` with all its texts such that no special token begins in them.

        `strict`: neither does a token in brackets that is not special but means something, as `<tool_call>`.
        """
        if isinstance(tree, str):
            pattern = self.strict if strict else self.lenient
            return pattern.sub(lambda found: self.private[found[0]], tree)
        if isinstance(tree, Mapping):
            return {self.hide(key, strict): self.hide(value, strict) for key, value in tree.items()}
        return [self.hide(part, strict) for part in tree] if isinstance(tree, list | tuple) else tree

    def show(self, text: str) -> str:
        """The other way."""
        return text.translate({ord(sign): first for first, sign in self.private.items()})


class SpecialText:
    """Hides special tokens in messages, and encodes what a template made of these."""

    def __init__(self, tokenizer: Tokenizer, templates: Iterable[str] = ()):
        inner = tokenizers.Tokenizer.from_str(tokenizer.literal_json())
        sources = [*templates]
        guarded = [token for token in json.loads(inner.to_str())["added_tokens"] if _means_something(token, sources)]
        # Nobody can write an alias, since nobody can guess it.
        secret = secrets.token_hex(16)
        self._alias = {token["content"]: f"\ue000{secret}:{token['id']}\ue001" for token in guarded}
        self._guarded = re.compile(_any_of(self._alias)) if guarded else None
        self._special = [token["content"] for token in guarded if token["special"]]
        self._inner = _with_aliases(inner, guarded, self._alias)
        self._ids = {self._inner.token_to_id(self._alias[token["content"]]): token["id"] for token in guarded}

    def hiding(self, texts: Iterable[str]) -> Hiding:
        """For a chat that has no other text than `texts`, the template's included."""
        used = set().union(*texts)
        free = (sign for code in _PRIVATE if (sign := chr(code)) not in used)
        private = dict(zip(sorted({content[0] for content in self._alias}), free, strict=False))
        if self._alias.keys() and len(private) < len({content[0] for content in self._alias}):
            raise UserError("The messages use every private character of Unicode; leave some out")
        meaning = self._alias.keys() - set(self._special)
        return Hiding(private, _beginning(self._alias), _beginning(self._special, meaning))

    def encode(self, rendered: str, hiding: Hiding) -> list[int]:
        """The ids of what the template made of hidden messages."""
        return [token for token, *_ in self.located(rendered, hiding)]

    def located(self, rendered: str, hiding: Hiding) -> list[tuple[int, int, int]]:
        """Each id of `encode`, and from where to where in `rendered` it is."""
        marked, places = self._marked(rendered)
        found = self._inner.encode(hiding.show(marked), add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [(self._ids.get(token, token), places[begin], places[end]) for token, (begin, end) in pairs]

    def _marked(self, rendered: str) -> tuple[str, list[int]]:
        """The text with the alias of each guarded token in its place, and where in `rendered` each character was."""
        parts, places, at = [], [], 0
        for found in self._guarded.finditer(rendered) if self._guarded else ():
            alias = self._alias[found[0]]
            parts += [rendered[at : found.start()], alias]
            places += [*range(at, found.start()), *[found.start()] * len(alias)]
            at = found.end()
        return "".join([*parts, rendered[at:]]), [*places, *range(at, len(rendered) + 1)]


def _means_something(token: Mapping[str, Any], templates: Sequence[str]) -> bool:
    """Whether an added token is special, is in brackets, or is a word that one of the templates writes, as a role."""
    content = token["content"]
    written = len(content.strip()) > 1 and any(content in template for template in templates)
    return token["special"] or written or bool(_BRACKETS.fullmatch(content))


def _with_aliases(inner: tokenizers.Tokenizer, guarded: list[dict], alias: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer, to which every guarded token is text, and its alias what it was."""
    inner = literal(inner, alias)
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    stand_ins = [
        tokenizers.AddedToken(alias[token["content"]], special=False, **{flag: token[flag] for flag in flags})
        for token in guarded
    ]
    inner.add_tokens(stand_ins)
    return inner


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression: the longest of `texts` here."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def _beginning(tokens: Iterable[str], unless: Iterable[str] = ()) -> re.Pattern:
    """A character with which one of `tokens` may begin: two of them here, or one and the text ends."""
    if not (tokens := [*tokens]):
        return re.compile(r"(?!)")
    seconds, firsts = _any_of({token[:2] for token in tokens}), _any_of({token[0] for token in tokens})
    but = f"(?!{_any_of(unless)})" if unless else ""
    return re.compile(rf"(?s){but}(?=(?:{seconds})|(?:{firsts})\s*\Z).")
