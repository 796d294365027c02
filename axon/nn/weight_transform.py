"""Weight transforms: operands that are more than an array, put in the place of the weights of an unmodified model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import jax
from flax import nnx
from jax import Array

from axon.axes import Names, base
from axon.axes.patterns import Contraction
from axon.chips.chip import Option
from axon.composition import FREEZES, Part
from axon.errors import UserError
from axon.kernels.attention import FP8Products
from axon.nn.param import Dims, Initializer, Param, ParamSpec, Variable, parameters
from axon.parallel.expert import Matrix
from axon.path_patterns import Patterns, check_patterns, matches

ROUTER = "router"
"""Name of the module in a mixture of experts that no transform takes unasked."""

LookUp = Callable[[Any, Array], Array]
"""(table, ids) → its rows in the compute dtype."""


class Operand(nnx.Module):
    """A weight as a transform made it: an `axon.axes.CompositeWeight` with parameters of its own.

    It stands for one array, the weight that the model declares, whose values make some of its parameters (`derived`)
    and follow from them (`merged`).
    """

    @property
    @abstractmethod
    def axes(self) -> Names:
        """The axes of the weight."""

    def drawn_as(self, path: str) -> "list[tuple[Param, str]]":
        """Of its parameters, in the place of the weight `path`, those whose initial values are drawn by the key of
        another path, as the weight's where they follow from its own; and that path."""
        return []

    @abstractmethod
    def contract(self, contraction: Contraction, x: Array) -> Array:
        """See `axon.axes.CompositeWeight`."""

    @abstractmethod
    def derived(self, value: Array) -> dict[str, Array]:
        """The parameters that follow from the weight's value, by their paths here; the others are drawn."""

    @abstractmethod
    def merged(self, values: Mapping[str, Array]) -> Array:
        """The weight that all parameters, by their paths here, stand for; float32 arithmetic."""

    def grouped(self, bias: Any) -> Matrix:
        """Experts' matrices, with those of their biases or None."""
        raise self._unusable("experts' matrices")

    def looked_up(self, ids: Array, look_up: LookUp) -> Array:
        """The rows of a table: `look_up` gives those of one that is a parameter."""
        raise self._unusable("a table")

    def whole(self) -> Array:
        """The array itself in the compute dtype, for an operation that needs it: a loss over a head."""
        raise self._unusable("the head of a loss")

    def _unusable(self, what: str) -> UserError:
        return UserError(f"{type(self).__name__} of {' '.join(self.axes)} cannot be {what}: leave it out of the paths")


Weight = Param | Operand
Declared = TypeVar("Declared", Param, Variable)


class WeightTransform(ABC):
    """The base of frozen dataclasses that say which weights become which operand.

    `paths` are patterns of the model's parameters, of which only matrices are taken; by default those of the blocks but
    for routers, whose choice turns on small differences. `adapts`: whether its operands' own parameters train, and
    then nothing else does, but what `others` matches. `freezes`: whether some of the model's weights do not.
    `keeps_weights`: whether the model without its operands is what a run starts from. `adapters`: the names of those
    that it trains at once, each by sequences of its own; none where it trains one by all. `attention`: what attention's
    products are made in beside its operands; None: in the dtype of theirs.
    """

    paths: Patterns | None
    adapts: ClassVar[bool] = False
    freezes: ClassVar[bool] = True
    others: Patterns = ()
    adapters: tuple[str, ...] = ()

    @property
    def attention(self) -> FP8Products | None:
        return None

    @property
    def keeps_weights(self) -> bool:
        return True

    @abstractmethod
    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        """The operand for `weight`: the parameter `declared`, which `spec` describes, or an operand that a transform
        before made of it."""

    @property
    def name(self) -> str:
        """What a person calls it, for messages."""
        return type(self).__name__

    def options(self, platform: str) -> tuple[Option, ...]:
        """XLA's options for programs with its operands on a platform, over those of the chip."""
        return ()

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        name = self.name
        return (
            ()
            if not self.freezes
            else (Part(f"Train.transforms = {name}", f"take {name} out of it", frozenset({FREEZES})),)
        )

    def fits(self, path: str, spec: ParamSpec) -> bool:
        """Whether it takes the parameter."""
        if len(spec.own) == 1 or not spec.decay:
            return False
        return spec.stack > 0 and ROUTER not in path.split("/") if self.paths is None else matches(path, self.paths)

    @property
    @abstractmethod
    def text(self) -> str:
        """The transform in a few words, for the log."""


def transform_weights(module: nnx.Module, transforms: Sequence[WeightTransform]) -> dict[str, Operand]:
    """Put what `transforms` make of the weights of `module` in their place, one transform after the other.

    Returns: path of each weight that has become an operand → this. Raises `UserError` for a transform that takes
    none.
    """
    owners = {"/".join(map(str, path)): owner for path, owner in nnx.iter_modules(module)}
    declared, found = parameters(module), {}
    whose = {path: (owners[path.rpartition("/")[0]], path.rpartition("/")[2]) for path in declared}
    weights: dict[str, Param] = {path: vars(owner)[name] for path, (owner, name) in whose.items()}
    for transform in transforms:
        kind = transform.name
        if transform.paths is not None:
            check_patterns(f"{kind}.paths", transform.paths, declared, "of this model")
        taken = [path for path, spec in declared.items() if transform.fits(path, spec)]
        if not taken:
            raise UserError(f"{kind}.paths = {transform.paths!r} matches no matrix: {kind} takes no vectors and biases")
        for path in taken:
            owner, name = whose[path]
            made = found[path] = transform.operand(vars(owner)[name], weights[path], declared[path])
            setattr(owner, name, made)
            for param, as_path in made.drawn_as(path):
                param.set_metadata(drawn_as=as_path)
    trained = _trained(transforms, declared)
    for path, weight in weights.items():
        weight.set_metadata(drawn_as=path, trained=path in trained)
    return found


def _trained(transforms: Sequence[WeightTransform], declared: Mapping[str, ParamSpec]) -> set[str]:
    """The parameters of the model that train: all do where no transform adapts."""
    adapting = [one for one in transforms if one.adapts]
    if not adapting:
        return set(declared)
    others = [one for one in adapting if one.others]
    for one in others:
        check_patterns(f"{type(one).__name__}.others", one.others, declared, "of this model")
    taken = {path for path, spec in declared.items() if any(one.fits(path, spec) for one in adapting)}
    return {path for path in declared if any(matches(path, one.others) for one in others)} - taken


def adapter_names(transforms: Sequence[WeightTransform]) -> tuple[str, ...]:
    """The adapters that are trained at once, by number. Raises `UserError` where another transform trains beside."""
    adapting = [one for one in transforms if one.adapts]
    names = tuple(name for one in adapting for name in one.adapters)
    if names and len(adapting) > 1:
        raise UserError(
            f"Train.transforms has {len(adapting)} that train, and one has the adapters {', '.join(names)}, each of "
            "which is to be as if it were trained alone: leave the others out"
        )
    return names


def beside(
    weight: Param, axes: Names, init: Initializer, dtype: Any, *, sizes: Dims = MappingProxyType({}), **options: Any
) -> Param:
    """A parameter with some of a weight's axes, or with others of these `sizes`, stacked as the weight is."""
    own = weight.get_value().shape[len(weight.stack) :]
    dims = dict(zip(map(base, weight.axes), own, strict=True)) | dict(sizes)
    return stacked_as(weight, Param(" ".join(axes), dims, init, dtype=dtype, **options))


def stacked_as(weight: Param, declared: Declared) -> Declared:
    """What is declared of one layer, once for each layer that a weight has."""
    own = declared.get_value()
    stack = weight.get_value().shape[: len(weight.stack)]
    declared.set_value(jax.ShapeDtypeStruct((*stack, *own.shape), own.dtype))
    declared.set_metadata(stack=weight.stack, layers=weight.layers)
    return declared


def untransformed(weight: Weight, declared: Param, transform: WeightTransform) -> Param:
    """The model's own parameter. Raises `UserError` where a transform before `transform` has made something of it."""
    if weight is not declared:
        name = transform.name
        raise UserError(
            f"{name} is of the model's own weights, and a {type(weight).__name__} of {' '.join(weight.axes)} stands in "
            f"the place of one: put {name} before what made it, in the list of transforms"
        )
    return declared


def transforms_text(
    transforms: Sequence[WeightTransform], declared: Mapping[str, ParamSpec], stored: Mapping[str, ParamSpec]
) -> list[str]:
    """Lines for the log: the matrices that each transform takes and leaves, and how much of all is trained."""
    lines = []
    for one in transforms:
        taken = [path for path, spec in declared.items() if one.fits(path, spec)]
        left = [p for p, spec in declared.items() if p not in taken and len(spec.own) > 1 and spec.decay]
        stay = f"; {', '.join(left)} stay" if left else ""
        lines.append(f"{one.text}: {len(taken)} of {len(declared)} parameters{stay}")
    trained = sum(math.prod(spec.shape) for spec in stored.values() if spec.trained)
    if any(one.adapts for one in transforms):
        total = sum(math.prod(spec.shape) for spec in stored.values())
        lines.append(f"{trained:,} of {total:,} numbers train ({trained / total:.2%})")
    return lines
