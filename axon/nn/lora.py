"""LoRA: low-rank adapters beside frozen weights (Hu et al., arXiv:2106.09685)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from axon.checks import check_range
from axon.composition import ACROSS_LAYERS, AVERAGES, LATE, REPLICAS, SKIPS, Part
from axon.errors import UserError
from axon.nn.adapted_weight import AdaptedWeight, outputs_of
from axon.nn.adapter_set import AdapterSet
from axon.nn.dora import DecomposedWeight
from axon.nn.param import Param, ParamSpec
from axon.nn.pissa import Principal
from axon.nn.weight_transform import Operand, Weight, WeightTransform
from axon.path_patterns import Patterns

NAME = re.compile(r"[\w.-]+")
"""Of an adapter."""

SEVERAL = Part(
    "LoRA.adapters",
    "train one adapter, LoRA.adapters = ()",
    frozenset({SKIPS}),
    {
        LATE: "an adapter without sequences in a batch would be stepped by other gradients than alone",
        REPLICAS: "between outer steps a replica would step an adapter of which it has no sequence",
        AVERAGES: "the parameters of one adapter are not averaged apart from those of others",
        ACROSS_LAYERS: "each adapter has an optimizer of its own, which is given its parameters alone",
    },
)
"""Several adapters, for the other parts of a run."""


@dataclass(frozen=True)
class LoRA(WeightTransform):
    """W becomes W + scale · A·B: A of its inputs by `rank`, B of `rank` by its outputs, W frozen.

    The sum is formed only where a model is exported, saved for another, or its loss is over an adapted head. A is
    drawn with variance 1 / inputs, B is 0. Everything else in the model is frozen too, but for `others`.

    Args:
        paths: patterns of the weights, as `Group.paths`; of these the matrices. By default all of the layers but for
            routers.
        rank: of A·B. alpha: scale = alpha / rank, or alpha / √rank with `rank_stabilized` (Kalajdzievski,
            arXiv:2312.03732).
        dora: W becomes magnitude · (W + scale · A·B) / norm, a magnitude for each output: DoRA (Liu et al.,
            arXiv:2402.09353), see `axon.nn.dora`.
        init: 'normal', as above; or 'pissa': A and B begin as the leading singular vectors of W, which becomes what
            remains of it (Meng et al., arXiv:2404.02948), so that the run starts as the model. pissa_iterations: of the
            randomised decomposition, 16 in the paper; None for the exact one.
        others: patterns of the model's parameters that train beside the adapters, such as norms.
        base: the dtype in which W is stored; None for its own.
        adapters: names of adapters that are trained at once, each with an A and a B of its own by the sequences of the
            data that are its own, as if it were alone (`axon.train.by_adapter`); () for one by all.
    """

    paths: Patterns | None = None
    rank: int = 8
    alpha: float = 16.0
    rank_stabilized: bool = False
    dora: bool = False
    init: Literal["normal", "pissa"] = "normal"
    pissa_iterations: int | None = None
    others: Patterns = ()
    base: Literal["float32", "bfloat16"] | None = None
    adapters: tuple[str, ...] = ()

    adapts: ClassVar[bool] = True

    def __post_init__(self):
        check_range(self, "[1, inf)", "rank")
        check_range(self, "(0, inf)", "alpha")
        check_range(self, "[0, 1000]", "pissa_iterations")
        if self.pissa_iterations is not None and self.keeps_weights:
            raise UserError("LoRA.pissa_iterations is of LoRA.init = 'pissa': set that too, or leave it out")
        if self.adapters:
            self._check_adapters()

    def _check_adapters(self) -> None:
        if wrong := [name for name in self.adapters if not NAME.fullmatch(name) or self.adapters.count(name) > 1]:
            raise UserError(
                f"LoRA.adapters has {wrong[0]!r}; must be different names, of letters, digits and any of _-."
            )
        shared = {"dora = True": self.dora, "init = 'pissa'": not self.keeps_weights, "others": bool(self.others)}
        if found := [name for name, is_set in shared.items() if is_set]:
            raise UserError(
                f"LoRA.{found[0]} is of all sequences together, and LoRA.adapters are each trained by their own: leave "
                "it out, or train the adapters one after the other"
            )

    @property
    def keeps_weights(self) -> bool:
        return self.init != "pissa"

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        inputs = math.prod(sizes[name] for name in spec.inputs)
        outputs = math.prod(size for name, size in sizes.items() if name in outputs_of(spec.own, spec.inputs))
        if self.rank > min(inputs, outputs):
            raise UserError(
                f"LoRA.rank is {self.rank}, and a weight of {' '.join(spec.own)} is {inputs} × {outputs}: lower it, or "
                "leave the weight out of LoRA.paths"
            )
        if self.base is not None:
            declared.set_value(jax.ShapeDtypeStruct(declared.get_value().shape, jnp.dtype(self.base)))
        if self.adapters:
            return AdapterSet(weight, declared, spec.inputs, self.rank, self.scale, self.adapters)
        kind = DecomposedWeight if self.dora else AdaptedWeight
        principal = None if self.keeps_weights else Principal(self.pissa_iterations)
        return kind(weight, declared, spec.inputs, self.rank, self.scale, principal)

    @property
    def composition(self) -> tuple[Part, ...]:
        return super().composition + ((SEVERAL,) if self.adapters else ())

    @property
    def text(self) -> str:
        more = "" if self.keeps_weights else ", begun as PiSSA"
        more += f", one for each of {', '.join(self.adapters)}" if self.adapters else ""
        return f"{'DoRA' if self.dora else 'LoRA'} of rank {self.rank}, scale {self.scale:g}{more}"


def one_adapter(transforms: Sequence[WeightTransform]) -> tuple[WeightTransform, ...]:
    """The transforms of a run that trains one adapter alone of those that these train at once."""
    return tuple(replace(one, adapters=()) if isinstance(one, LoRA) else one for one in transforms)
