"""Tokenizers of which no text has a special token: `</s>` written in a document or a message is those four characters.

The library's own switch, `encode_special_tokens`, is not enough. A tokenizer.json may declare what opens documents an
ordinary token, or not at all; and some models (Unigram, WordLevel) have special tokens in their vocabulary, and find
them in a text as they find words.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import Regex, pre_tokenizers


def literal(
    inner: tokenizers.Tokenizer, tokens: Collection[str], spec: Mapping[str, Any] | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer with the same ids, to which each of `tokens` is special, and text where a text has it.

    `spec`: the content of its tokenizer.json, if that is parsed already.
    """
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    if not special.issuperset(tokens):
        inner = _declared(inner, tokens, json.loads(inner.to_str()) if spec is None else spec)
    inner.encode_special_tokens = True
    if spelled := [token for token in sorted(tokens) if len(token) > 1 and _is_spelled(inner, token)]:
        apart = pre_tokenizers.Split(Regex(_inside(spelled)), "isolated")
        words = inner.pre_tokenizer
        inner.pre_tokenizer = apart if words is None else pre_tokenizers.Sequence([words, apart])  # type: ignore
    return inner


def _declared(inner: tokenizers.Tokenizer, tokens: Iterable[str], spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    added = {token["content"]: dict(token) for token in spec["added_tokens"]}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token in tokens:
        added.setdefault(token, {"id": inner.token_to_id(token), "content": token, **plain})["special"] = True
    declared = {**spec, "added_tokens": sorted(added.values(), key=lambda token: token["id"])}
    return tokenizers.Tokenizer.from_str(json.dumps(declared))


def _is_spelled(inner: tokenizers.Tokenizer, token: str) -> bool:
    """Whether `inner` makes the token of a text that has it: as a word, or within one."""
    return any(inner.token_to_id(token) in _ids(inner, text) for text in (token, f" {token} ", f"a{token}a"))


def _ids(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return inner.encode(text, add_special_tokens=False).ids
    except Exception:  # the library raises nothing narrower, where a model has no token for what it does not know
        return []


def _inside(tokens: Iterable[str]) -> str:
    """A regular expression that matches, in each of `tokens`, the place after its first character."""
    return "|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in tokens)
