"""`Drawn`, a batch of sampled answers that may wait for the step that trains on it."""

import base64
import io
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from axon.data.feed import Batch


@dataclass(frozen=True)
class Drawn:
    """A batch of sampled answers.

    Args:
        number: of the batch. step: after which its answers were sampled. arrays: of the global batch. metrics: of what
            was sampled for it.
    """

    number: int
    step: int
    arrays: Batch
    metrics: Mapping[str, float]

    def saved(self) -> dict[str, Any]:
        """The batch as JSON, bit for bit."""
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **self.arrays)
        arrays = base64.b64encode(file.getvalue()).decode("ascii")
        return {"number": self.number, "step": self.step, "metrics": dict(self.metrics), "arrays": arrays}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Drawn":
        """The batch that `saved` wrote."""
        with np.load(io.BytesIO(base64.b64decode(saved["arrays"])), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return cls(saved["number"], saved["step"], arrays, saved["metrics"])


class Later:
    """A batch that is made when it is first asked for, by all processes of a run together."""

    def __init__(self, make: Callable[[], Drawn]):
        self._make = make

    def result(self) -> Drawn:
        return self._made

    @cached_property
    def _made(self) -> Drawn:
        return self._make()


def done(drawn: Drawn) -> Future[Drawn]:
    """A batch that nothing waits for."""
    future: Future[Drawn] = Future()
    future.set_result(drawn)
    return future
