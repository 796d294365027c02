"""The text of tokens as they come: whole characters only, and nothing of a stop text."""

from collections.abc import Iterable, Sequence

from axon.data.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
"""What stands for bytes that are no character: at the end of a text, perhaps because the rest is still to come."""

CONTEXT = 4
"""Tokens that are decoded once more with those that follow them: of a character that is not whole there are 3 bytes at
most; and decoders that treat the first token differently, as they drop its space, do so with one of these."""


class Detokenizer:
    """The text of the ids that follow a prompt, in pieces.

    The pieces together are `tokenizer.continuation(prompt, ids)` up to a stop text, however the ids are split. A piece
    has what is certain: neither the beginning of a character nor that of a stop text; and characters that are spelled
    in byte tokens (`<0x0A>`) when another token follows them, as one wrong byte makes all of them wrong.

    Args:
        prompt: ids. stop: texts; the first that is complete ends the text, and is left out, as what follows it. Of two
            that are complete at once, the longer. ends: ids, likewise; None: the tokenizer's.
        min_tokens: a stop text that is complete with so many tokens or fewer is text.

    Attributes:
        stopped: whether a stop text came.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: tuple[str, ...] = (),
        ends: frozenset[int] | None = None,
        min_tokens: int = 0,
    ):
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._ends, self._unstoppable = tokenizer.ends if ends is None else ends, min_tokens
        self._window = _context(tokenizer, prompt)  # decoded ids, of whose text so many characters are given
        self._given = len(tokenizer.visible(self._window))
        self._placed = False
        self._undecoded: list[int] = []
        self._settled = 0  # how many of these there are up to the last that is not a byte token
        self._held = ""
        self._ended = False
        self._count = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now, after these ids too; none after an id that ends texts."""
        return "".join(map(self._pushed, ids))

    def _pushed(self, token: int) -> str:
        self._ended |= token in self._ends
        if self._ended or self.stopped:
            return ""
        self._count += 1
        if self._tokenizer.is_visible(token):
            self._undecoded.append(token)
            self._settled = self._settled if token in self._tokenizer.byte_tokens else len(self._undecoded)
        return self._released(self._decoded(self._settled, is_last=False), is_last=False)

    def finish(self) -> str:
        """The rest of the text, incomplete characters as U+FFFD."""
        self._ended = True
        return self._released(self._decoded(len(self._undecoded), is_last=True), is_last=True)

    def _decoded(self, count: int, is_last: bool) -> str:
        """The new text of the first of what is undecoded."""
        new = self._undecoded[:count]
        if not (new or is_last) or not self._is_placed(new, is_last):
            return ""
        ids = self._window + new
        text = self._tokenizer.visible(ids)
        doubtful = int(not is_last and text.endswith(INCOMPLETE))
        piece = text[self._given : len(text) - doubtful]
        self._window, self._undecoded, self._settled = ids[-CONTEXT:], self._undecoded[count:], 0
        self._given = len(self._tokenizer.visible(self._window)) - doubtful
        return piece

    def _is_placed(self, new: list[int], is_last: bool) -> bool:
        """Whether it is known where the text begins: as `Tokenizer.continuation`, on its own where the ids complete a
        character of the prompt."""
        if not self._placed:
            before = self._tokenizer.visible(self._window)
            if before.endswith(INCOMPLETE) and len(new) < CONTEXT and not is_last:
                return False
            if not self._tokenizer.visible(self._window + new).startswith(before):
                self._window, self._given = [], 0
            self._placed = True
        return True

    def _released(self, text: str, is_last: bool) -> str:
        """What is certain of the text that is held back and this."""
        if self.stopped:
            return ""
        before, text = len(self._held), self._held + text
        found = []
        if self._count > self._unstoppable:
            places = ((stop, text.find(stop, max(0, before + 1 - len(stop)))) for stop in self._stop)
            found = [(at + len(stop), at) for stop, at in places if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) if is_last else self._beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def _beginning(self, text: str) -> int:
        """Where at the end of `text` a stop text may begin."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = range(max(0, len(text) - longest), len(text))
        return next((at for at in ends if any(stop.startswith(text[at:]) for stop in self._stop)), len(text))


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt: byte tokens at its end, and `CONTEXT` before them."""
    found: list[int] = []
    others = 0
    for token in reversed(prompt):
        if tokenizer.is_visible(token):
            others += others > 0 or token not in tokenizer.byte_tokens
            found.append(token)
        if others == CONTEXT:
            break
    return found[::-1]
