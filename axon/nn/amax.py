"""A recorder of the largest magnitudes that contractions see: the ranges from which 8-bit formats take their scales."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from axon.axes import Names, Report, Reporting, einsum, reporting_einsum, stored_array
from axon.axes.patterns import Contraction
from axon.axes.statistics import OPERANDS, largest_magnitude
from axon.checks import check_range
from axon.nn.param import Param, ParamSpec, Variable
from axon.nn.weight_transform import Operand, Weight, WeightTransform, stacked_as, untransformed
from axon.parallel.expert import Matrix
from axon.path_patterns import Patterns


@dataclass(frozen=True)
class RecordAmax(WeightTransform):
    """Each weight's contractions record the largest magnitudes of `x`, of the weight and of `dy`: `RecordedWeight`.

    They are those of a step's global batch, the same on every layout.

    Args:
        paths: as of `WeightTransform`. history: of how many steps they are kept.
    """

    paths: Patterns | None = None
    history: int = 1

    freezes: ClassVar[bool] = False

    def __post_init__(self):
        check_range(self, "[1, 65536)", "history")

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        return RecordedWeight(untransformed(weight, declared, self), self.history)

    @property
    def text(self) -> str:
        return f"largest magnitudes recorded for {self.history} steps"


class RecordedWeight(Operand):
    """`base`, and `amax`: the largest magnitudes of its operands `x`, `w` and `dy` in the last steps, latest first."""

    def __init__(self, weight: Param, history: int):
        self.base, self.amax = weight, amax_variable(weight, history)

    @property
    def axes(self) -> Names:
        return self.base.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        report = report_to(self.amax)
        if report is None:
            return einsum(contraction.text, x, self.base)
        return reporting_einsum(contraction, x, self.base, report)

    def grouped(self, bias: Any) -> Matrix:
        return Matrix(stored_array(self.base, "experts"), bias=bias, report=report_to(self.amax))

    def derived(self, value: Array) -> dict[str, Array]:
        return {"base": value}

    def merged(self, values: Mapping[str, Array]) -> Array:
        return values["base"]


def amax_variable(weight: Param, history: int) -> Variable:
    """`operand history`: the largest magnitudes of a weight's `OPERANDS` in the last steps, latest first."""
    sizes = {"_operand": len(OPERANDS), "_history": history}
    return stacked_as(weight, Variable("_operand _history", sizes, _recorded, reported=(len(OPERANDS),)))


def report_to(variable: Variable) -> Report | None:
    """Where the next use of a weight is to report, if anything is differentiated."""
    seen = variable.get_value()
    if not isinstance(seen, Reporting):
        return None
    report, rest = Report(seen.report, largest_magnitude).forked()
    variable.set_value(replace(seen, report=rest.array))
    return report


def _recorded(history: Array, latest: Array) -> Array:
    """`operand history` with the latest in front, of all layers."""
    return jnp.concatenate([latest[..., None], history[..., :-1]], axis=-1)
