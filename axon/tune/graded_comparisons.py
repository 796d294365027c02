"""`GradedComparisons`, pairs of answers, with by how much one is better, and ties."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from axon.errors import UserError
from axon.serve.chat_turns import Turns
from axon.train.graded_reward import MARGINS, TIE, GradedReward
from axon.tune.comparisons import Comparisons
from axon.tune.examples import Read
from axon.tune.formats import PAIRS, Format
from axon.tune.packing import Document


@dataclass(frozen=True)
class GradedComparisons(Comparisons):
    """Pairs for the objective `GradedReward`: a record is as of `Comparisons`, and may have a `margin`, a number of at
    least 0, by how much its chosen answer is better; or `tie`, true where neither is, whichever is called chosen."""

    formats: ClassVar[tuple[Format, ...]] = tuple(
        replace(one, optional=(*one.optional, "margin", "tie")) for one in PAIRS
    )

    def document(self, turns: Turns, read: Read) -> Document:
        document = super().document(turns, read)
        margins = np.zeros(len(document.ids), np.float32)
        margins[1] = self._margin(read)  # of the first target, which is left where an example is cut
        return replace(document, more={MARGINS: margins})

    @property
    def more(self) -> Mapping[str, np.ndarray]:
        return {MARGINS: np.zeros((), np.float32)}

    def check_objective(self, objective: Any) -> None:
        super().check_objective(objective)
        if not isinstance(objective, GradedReward):
            raise UserError(
                f"Train.data is GradedComparisons, and Train.objective a {type(objective).__name__}: set "
                "Train.objective = @GradedReward(), or Train.data = @Comparisons()"
            )

    def _margin(self, read: Read) -> float:
        """The margin of a record's pair. Raises `UserError` for what is none."""
        tie, margin = (read.record.get(self.names.column(name)) for name in ("tie", "margin"))
        if tie not in (None, True, False):
            raise UserError(f"{read.where}: column {self.names.column('tie')!r} has {tie!r}; expected true or false")
        if tie:
            return TIE
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
            raise UserError(
                f"{read.where}: column {self.names.column('margin')!r} has {margin!r}; expected a number of at least "
                "0, by how much the chosen answer is better"
            )
        return float(margin)
