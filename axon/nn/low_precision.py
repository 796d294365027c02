"""Weights whose products are made by a recipe of `axon.precision`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array

from axon.axes import Names, Reporting, current, einsum, stored_array, use_weight
from axon.axes.patterns import Contraction
from axon.chips.chip import Option
from axon.composition import STAGES, Part
from axon.kernels.attention import FP8Products
from axon.nn.amax import amax_variable, report_to
from axon.nn.param import Param, ParamSpec
from axon.nn.weight_transform import Operand, Weight, WeightTransform, untransformed
from axon.parallel.expert import Matrix
from axon.path_patterns import Patterns
from axon.precision.product import RecipeProduct
from axon.precision.recipe import Recipe

EXPERTS = "experts"


@dataclass(frozen=True)
class LowPrecision(WeightTransform):
    """Each weight's products by `recipe`: by default those of blocks but for routers, and for experts where the recipe
    does not take them."""

    recipe: Recipe

    freezes: ClassVar[bool] = False

    @property
    def paths(self) -> Patterns | None:
        return self.recipe.paths

    @property
    def attention(self) -> FP8Products | None:
        return self.recipe.attention_products

    @property
    def name(self) -> str:
        return type(self.recipe).__name__

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        return LowPrecisionWeight(untransformed(weight, declared, self), self.recipe)

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        if not (ends := self.recipe.ends_text):
            return ()
        why = "a stage runs one program for whichever layers it has"
        return (Part(ends, "leave no layers out", excludes={STAGES: why}),)

    def options(self, platform: str) -> tuple[Option, ...]:
        return self.recipe.options(platform)

    def fits(self, path: str, spec: ParamSpec) -> bool:
        is_able = self.recipe.takes_experts or EXPERTS not in spec.own
        return super().fits(path, spec) and (self.paths is not None or is_able)

    @property
    def text(self) -> str:
        return self.recipe.text


class LowPrecisionWeight(Operand):
    """A weight, stored as it is, whose products are made by a recipe; and `amax`, if its scales follow from that: see
    `axon.nn.amax.RecordedWeight`. In `excepted_layers` they are those of a plain weight: see
    `axon.nn.capabilities.DiffersByLayer`."""

    def __init__(self, weight: Param, recipe: Recipe):
        self.base, self.recipe, self.layer = weight, recipe, None
        self.excepted_layers = recipe.excepted_layers(weight.num_layers) if weight.stack else frozenset()
        if recipe.recorded_steps:
            self.amax = amax_variable(weight, recipe.recorded_steps)

    @property
    def axes(self) -> Names:
        return self.base.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        scope = current()
        if scope is None or self._is_excepted:
            return einsum(contraction.text, x, self.base)
        product = RecipeProduct.of(scope, contraction, self.recipe)
        return use_weight(scope, product, stored_array(self.base, "a recipe"), x, *self._recorded())

    def grouped(self, bias: Any) -> Matrix:
        if not self.recipe.takes_experts:
            raise self._unusable("experts' matrices")
        recipe = None if self._is_excepted else self.recipe
        return Matrix(stored_array(self.base, "experts"), bias=bias, recipe=recipe)

    @property
    def _is_excepted(self) -> bool:
        return self.layer in self.excepted_layers

    def _recorded(self) -> list[Array]:
        """The largest magnitudes to be expected of the operands, and the array to report these to, in training."""
        if not self.recipe.recorded_steps:
            return []
        seen, report = self.amax.get_value(), report_to(self.amax)
        recorded = seen.value if isinstance(seen, Reporting) else seen
        return [self.recipe.magnitudes(recorded), *([] if report is None else [report.array])]

    def derived(self, value: Array) -> dict[str, Array]:
        return {"base": value}

    def merged(self, values: Mapping[str, Array]) -> Array:
        return values["base"]


def with_recipe(recipe: Recipe | None, transforms: Sequence[WeightTransform]) -> tuple[WeightTransform, ...]:
    """The transforms of a run: its recipe's before those that a person lists."""
    return tuple(transforms) if recipe is None else (LowPrecision(recipe), *transforms)
