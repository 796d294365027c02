"""A weight with several products of low rank beside it, each of which sequences of its own train."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from axon import axes
from axon.axes import Names, base, einsum, shard, strip_roles
from axon.axes.contraction import broadcast_to_axes
from axon.axes.patterns import Contraction
from axon.errors import UserError
from axon.nn.adapted_weight import derived_base, factors_beside, grouped_beside, low_rank_product
from axon.nn.param import Param, fan_in
from axon.nn.weight_transform import Operand, Weight
from axon.parallel.expert import Matrix

ADAPTERS = "adapters"
"""What the paths of adapters' factors have after the weight's: `WEIGHT/adapters/NAME/a`."""


def stored_factor(path: str, adapter: str) -> str:
    """Where an `AdapterSet` has the factor that LoRA of one adapter has at `path`."""
    weight, _, factor = path.rpartition("/")
    return f"{weight}/{ADAPTERS}/{adapter}/{factor}"


def factors_of_adapter(values: Mapping[str, Any], paths: Iterable[str], adapter: str) -> dict[str, Any]:
    """The parameters that one adapter's model has alone, at `paths`, of the `values` that a run of several has."""
    return {path: values[path if path in values else stored_factor(path, adapter)] for path in paths}


def is_of_adapter(path: str, adapter: str) -> bool:
    """Whether a parameter is a factor of the adapter."""
    return path.split("/")[-3:-1] == [ADAPTERS, adapter]


class Factors(nnx.Module):
    """The factors A and B of one adapter."""

    def __init__(self, declared: Param, inputs: Names, rank: int):
        self.a, self.b = factors_beside(declared, inputs, rank, fan_in(" ".join(inputs)))


class AdapterSet(Operand):
    """`base`, and beside it the factors of each adapter, times `scale`, with which the sequences that train it are
    multiplied (`axon.axes.sequence_adapters`).

    An adapter's initial values are those that it has alone.
    """

    def __init__(self, weight: Weight, declared: Param, inputs: Names, rank: int, scale: float, names: tuple[str, ...]):
        self.base, self.scale, self.names = weight, scale, names
        self.adapters = nnx.Dict({name: Factors(declared, inputs, rank) for name in names})

    @property
    def axes(self) -> Names:
        return self.base.axes

    def drawn_as(self, path: str) -> list[tuple[Param, str]]:
        return [(self.adapters[name].a, f"{path}/a") for name in self.names]

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """The base's product, and each adapter's with its own sequences."""
        y = einsum(contraction.text, x, self.base)
        for number, name in enumerate(self.names):
            factors, own = self.adapters[name], partial(self._own, number)
            y += self.scale * low_rank_product(self.axes, factors.a, factors.b, contraction, x, own)
        return y

    def grouped(self, bias: Any) -> Matrix:
        factors = [(self.adapters[name].a, self.adapters[name].b) for name in self.names]
        return grouped_beside(self.base, bias, factors, self.scale)

    def derived(self, value: Array) -> dict[str, Array]:
        return derived_base(self.base, value)

    def merged(self, values: Mapping[str, Array]) -> Array:
        """Refused: there is one for each adapter."""
        raise self._unusable("merged, for all adapters at once")

    def _own(self, number: int, names: Names, narrow: Array) -> Array:
        """The products with a first factor, of these axes, 0 but for the sequences of the adapter with this number."""
        rows = next((name for name in names if base(name) == "batch"), None)
        if rows is None:
            raise UserError(
                f"a weight of {' '.join(self.axes)} is multiplied with what has the axes {' '.join(names)}, and an "
                "adapter belongs to a sequence of `batch`: leave the weight out of LoRA.paths"
            )
        own = shard(_sequence_adapters(), rows) == number
        return jnp.where(broadcast_to_axes(own, ("batch",), strip_roles(names)), narrow, 0)


def _sequence_adapters() -> Any:
    scope = axes.current()
    numbers = None if scope is None else scope.sequence_adapters
    if numbers is None:
        raise UserError(
            "a model with LoRA.adapters is used for sequences of which nobody says whose they are: name one adapter "
            "of the run, as RUN:NAME; in training leave weights that are not of the layers out of LoRA.paths"
        )
    return numbers
