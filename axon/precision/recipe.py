"""Recipes: in which format each operand of a weight's three products is multiplied, as data."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.checks import check_range
from axon.chips import CHIPS, Chip, chip_of
from axon.chips.chip import Option
from axon.errors import UserError
from axon.kernels.attention import FP8Products
from axon.kernels.attention.fp8 import PRODUCTS
from axon.layout import Placement
from axon.path_patterns import Patterns
from axon.precision.formats import Format

ON_GPUS = (
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "Products of 8 bits are cuBLASLt's and our own kernels', and not compiled in each of Triton's forms as well.",
        "Six layers of Llama 3.1 8B by FP8Current on one H200, 8 x 4,096 tokens, jax 0.11.2, 2026-11-28: compiled and "
        "run in 27 s, not ended after 63 s without; 50,250 tokens/s beside 46,096 in bfloat16.",
    ),
)


class Products(NamedTuple):
    """The formats of two operands in each of a weight's three products.

    None, of `x` or `w` in a gradient: the values of the forward, whose scales `dy` is multiplied by before it is
    rounded. So each is rounded once, and `x` is kept for the backward in 8 bits.
    """

    forward: tuple[Format, Format]  # x, w
    input_gradient: tuple[Format, Format | None]  # dy, w
    weight_gradient: tuple[Format | None, Format]  # x, dy

    @property
    def formats(self) -> list[Format]:
        return [form for pair in self for form in pair if form is not None]


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """The base of recipes, which are data: what they say is executed by `axon.precision.product`.

    Args:
        paths: patterns of the weights whose products are made so; by default the matrices of the blocks but for
            routers, and for experts unless it `takes_experts`. All else stays as `Precision.compute` says: embedding,
            head, norms, biases.
        first, last: so many of a model's blocks at either end stay so too, those of an encoder and those of a
            decoder.
        emulate: round and scale as the formats say, and multiply in float32: on any chip, in more time than without a
            recipe.
    """

    paths: Patterns | None = None
    first: int = 0
    last: int = 0
    emulate: bool = False

    takes_experts: ClassVar[bool] = True
    """Whether experts' matrices, whose products are grouped, can be multiplied so."""

    def __post_init__(self):
        check_range(self, "[0, 2**16)", "first", "last")

    @property
    @abstractmethod
    def products(self) -> Products: ...

    @property
    def attention_products(self) -> FP8Products | None:
        """What the products of attention's forward are made in; None: in `Precision.compute`."""
        return None

    @property
    def recorded_steps(self) -> int:
        """Of how many steps before the largest magnitudes give the scales; 0: those of the operand itself do."""
        return 0

    def magnitudes(self, recorded: Array) -> Array:
        """`operand`: the largest of x, w and dy to be expected, of those recorded, `operand history`, latest first."""
        return jnp.max(recorded, axis=-1)

    def options(self, platform: str) -> tuple[Option, ...]:
        """XLA's options for programs with its products on a platform: `cpu`, `gpu` or `tpu`."""
        return ON_GPUS if platform == "gpu" and not self.emulate else ()

    @property
    def text(self) -> str:
        """The recipe in a few words, for the log."""
        ends = " and ".join(f"{end} {count}" for end, count in self._ends.items())
        left = f", without the {ends} layers" if ends else ""
        return f"{type(self).__name__}{', emulated' if self.emulate else ''}{left}"

    @property
    def _ends(self) -> dict[str, int]:
        return {end: count for end, count in (("first", self.first), ("last", self.last)) if count}

    @property
    def ends_text(self) -> str:
        """The fields that leave layers out, as a person sets them; empty if none does."""
        return " and ".join(f"{type(self).__name__}.{end} = {count}" for end, count in self._ends.items())

    def excepted_layers(self, num_layers: int) -> frozenset[int]:
        """The layers of so many that stay as `Precision.compute` says. Raises `UserError` if all would."""
        if self._ends and self.first + self.last >= num_layers:
            raise UserError(
                f"{self.ends_text}: a model of {num_layers} layers has none left for the recipe. Leave fewer than "
                f"{num_layers} out, or set Precision.recipe to None"
            )
        return frozenset((*range(self.first), *range(num_layers - self.last, num_layers)))

    def check(self, placement: Placement) -> None:
        """Raise `UserError` where the recipe cannot be carried out: on a chip without its products, or with products in
        rings of parts."""
        if placement.overlap:
            name = type(self).__name__
            raise UserError(
                f"Precision.recipe = {name} and Layout.overlap = {placement.layout.overlap} cannot be combined: a ring "
                "multiplies parts in 16 bits. Set Layout.overlap to (), or Precision.recipe to None"
            )
        if placement.devices:
            self.check_chip(chip_of(placement.chip), placement.chip)

    def check_chip(self, chip: Chip | None, called: str) -> None:
        """Raise `UserError` for a chip, or one that is `called` so and not known, without the recipe's products."""
        name, needed = type(self).__name__, {form.product for form in self.products.formats}
        if self.attention_products is not None:
            needed.add(PRODUCTS)
        if self.emulate or (chip is not None and needed <= chip.products):
            return
        able = ", ".join(chip.name for chip in CHIPS.values() if needed <= chip.products)
        where = f"{able} has them" if able else "there is no kernel for them yet, on any chip"
        raise UserError(
            f"Precision.recipe = {name} needs products of {' and '.join(sorted(needed))}, which {called!r} lacks; "
            f"{where}. Set {name}.emulate = True, to round alike and multiply in float32, or Precision.recipe = None"
        )
