"""The requests that a serving plan is for, and the latencies that they are promised."""

from dataclasses import dataclass, fields
from pathlib import Path

from axon.errors import UserError, suggest
from axon.foreign_json import number, read_field, read_json

POSITIVE, TOKENS = number("(0, inf)"), number("[1, 2**31)")


@dataclass(frozen=True)
class Workload:
    """Requests that arrive independently of each other (a Poisson process), by their means.

    Args:
        requests_per_second: of all engines together. prompt_tokens: read of a request. answer_tokens: written.
        ttft_ms: from a request's arrival to its first token. tpot_ms: from one of its tokens to the next. Both are
            bounds of means.
    """

    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    ttft_ms: float
    tpot_ms: float

    @classmethod
    def read(cls, path: Path) -> "Workload":
        """The workload of a JSON object with these fields.

        Raises `UserError` for a file that is none, for an absent or unknown field, and for a number out of range.
        """
        where, content = f"{path} (--traffic)", read_json(path)
        names = [field.name for field in fields(cls)]
        for name in content:
            if name not in names:
                raise UserError(f"{where}: unknown field {name!r}.{suggest(name, names)}")
        kinds = {name: TOKENS if name.endswith("tokens") else POSITIVE for name in names}
        return cls(**{name: float(read_field(where, content, name, kind)) for name, kind in kinds.items()})

    @property
    def context(self) -> float:
        """Tokens that a request has while it writes, on average."""
        return self.prompt_tokens + self.answer_tokens / 2
