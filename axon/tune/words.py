"""Small tasks for quickstarts: words of random letters, or sums, and the one right answer to each."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from axon.checks import check_range
from axon.data.records import Record, fingerprint
from axon.errors import UserError


@dataclass(frozen=True)
class Words:
    """`count` records with a `prompt`, a random word, and a `completion`, what the task makes of it; drawn by `seed`.
    In a share `careless` of the completions two neighbours, which differ, are exchanged.

    With `pairs` they have `chosen`, that answer, and `rejected`, the same with two neighbours exchanged, instead; a
    share `careless` of them the other way about.

    Args:
        task: "reverse": the word backwards. "rotate": its first letter at its end. "sort": its letters in order.
            letters: how many of the alphabet there are. shortest, longest: letters of a word.
    """

    count: int = 4096
    task: Literal["reverse", "rotate", "sort"] = "reverse"
    letters: int = 12
    shortest: int = 3
    longest: int = 6
    pairs: bool = False
    careless: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "count")
        check_range(self, "[0, 1]", "careless")
        check_range(self, "[2, 26]", "letters")
        check_range(self, "[2, 2**16)", "shortest", "longest")
        check_range(self, "[0, inf)", "seed")

    @property
    def name(self) -> str:
        return "words"

    def key(self) -> str:
        return fingerprint("words", asdict(self))

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `axon.data.records.RecordSource`. Each word has two neighbours that differ."""
        rng = np.random.default_rng(self.seed)
        for number in range(self.count):
            yield f"words {number}", self._record(rng)

    def _record(self, rng: np.random.Generator) -> Record:
        word = ""
        while len({*word}) < 2:
            length = rng.integers(self.shortest, self.longest + 1)
            word = "".join(chr(ord("a") + one) for one in rng.integers(self.letters, size=length))
        right = {"reverse": word[::-1], "rotate": word[1:] + word[0], "sort": "".join(sorted(word))}[self.task]
        if not (self.pairs or self.careless):
            return {"prompt": word, "completion": right}
        place = rng.choice([at for at in range(len(right) - 1) if right[at] != right[at + 1]])
        wrong = right[:place] + right[place + 1] + right[place] + right[place + 2 :]
        slips = self.careless > 0 and rng.random() < self.careless
        first, second = (wrong, right) if slips else (right, wrong)
        if self.pairs:
            return {"prompt": word, "chosen": first, "rejected": second}
        return {"prompt": word, "completion": first}


@dataclass(frozen=True)
class Addition:
    """Records with a `prompt`, a sum of `terms` numbers up to `largest`, as 7+12, and a `completion`, what it comes to:
    `count` of them, drawn by `seed`, none twice. A share `careless` of the completions are one too many. A share
    `asked` of the records are chats instead, in which the sum is asked of `Calculator`, and its result answered.

    Raises `UserError` where there are not so many.
    """

    count: int = 1000
    terms: int = 2
    largest: int = 99
    careless: float = 0.0
    asked: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_range(self, "[1, 2**24)", "count", "largest")
        check_range(self, "[2, 8]", "terms")
        check_range(self, "[0, 1]", "careless", "asked")
        check_range(self, "[0, inf)", "seed")
        if self.count > (there := (self.largest + 1) ** self.terms):
            raise UserError(
                f"Addition.count is {self.count}, and there are {there:,} such sums: set it to {there} at most"
            )

    @property
    def name(self) -> str:
        return "addition"

    def key(self) -> str:
        return fingerprint("addition", asdict(self))

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `axon.data.records.RecordSource`."""
        rng, base = np.random.default_rng(self.seed), self.largest + 1
        asked = np.random.default_rng((self.seed, 1)).random(self.count) < self.asked
        for number, code in enumerate(rng.choice(base**self.terms, self.count, replace=False).tolist()):
            numbers = [code // base**place % base for place in range(self.terms)]
            total = sum(numbers) + (not asked[number] and rng.random() < self.careless)
            prompt, completion = "+".join(map(str, numbers)), str(total)
            alone = {"prompt": prompt, "completion": completion}
            yield f"addition {number}", {"messages": _by_tool(**alone)} if asked[number] else alone


def _by_tool(prompt: str, completion: str) -> list[dict[str, str]]:
    turns = [("user", prompt), ("assistant", f"{prompt}="), ("tool", completion), ("assistant", completion)]
    return [{"role": role, "content": text} for role, text in turns]
