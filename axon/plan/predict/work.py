"""What a training step does, from the model's own declarations: nothing here depends on a layout.

A period of each segment of layers is traced for one sequence on one device: what its backward keeps under each remat
policy is what JAX keeps, and FLOPs are those of its program.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from axon.axes import ArraySpec
from axon.axes.execution import Remat
from axon.errors import UserError
from axon.kernels.attention import NAME as ATTENTION
from axon.nn.capabilities import ChoosesExperts, NamesActivations
from axon.nn.flops import forward_flops, matmul_flops, paths_in, training_flops
from axon.nn.language_model import LanguageModel
from axon.nn.low_precision import LowPrecision
from axon.nn.param import Param, ParamSpec
from axon.parallel.context import AttentionKind
from axon.plan.predict.traced import LAYERS, Kept, Traced, trace
from axon.precision import Recipe
from axon.runtime import Runtime
from axon.runtime.context import attention_by_block
from axon.train.optimizers import frozen_paths
from axon.train.step import Program

STORED = "/base"


class Under(NamedTuple):
    """A period under a remat policy.

    `kept`: what waits for its backward. `waits`: in a pipeline's slots, but for the period's input. `left`: what the
    part of a split backward for the inputs leaves for that for the weights. `repeated`: the share of the forward that
    the backward computes again, but for attention over pairs, of which `again` is that share. `summed`: elements of a
    token that sums read again.
    """

    kept: Kept
    waits: Kept
    left: Kept
    repeated: float
    again: float
    summed: float


@dataclass(frozen=True)
class Period:
    """One period of a segment, which is repeated `times`.

    Args:
        seq: positions of a sequence. matrices: path → one layer's weights, as the model declares them. weights: as they
            are stored, of which a transform may have made several. chosen: the share of experts that multiply a token.
        forward: FLOPs of a token. backward: of it too, ÷ `forward`. attention: of the forward's, those over pairs of
            tokens. largest: the share of the largest layer.
        narrow: the share of 8-bit products. rounded_elements: of a token, in their operands. dispatched: bytes of an
            element that is sent to its expert, ÷ those of one in the compute dtype.
        none, full: traced without remat, and with all but the input computed again. own: FLOPs of a token in kernels of
            attention, forward; 0 where it is none. attentions: the kinds of attention in its blocks.
    """

    times: int
    seq: int
    matrices: Mapping[str, ParamSpec]
    weights: Mapping[str, ParamSpec]
    chosen: float
    forward: float
    backward: float
    attention: float
    largest: float
    narrow: float
    rounded_elements: float
    dispatched: float
    none: Traced
    full: Traced
    own: float
    attentions: tuple[AttentionKind, ...]

    @cached_property
    def under(self) -> Callable[[Any], Under]:
        """What a policy makes of it: one of names, what these keep and what of the forward lies behind them."""
        return cache(self._under)

    def _under(self, policy: Remat) -> Under:
        if policy == "none":
            return Under(self.none.kept, self.none.waits, self.none.left, 0.0, 0.0, 0.0)
        names = self.kept_by(policy)
        more = sum((self.none.names[name] for name in names), Kept({}, {}))
        return Under(self.full.kept + more, self.full.waits + more, self.full.left, *self._again(names))

    def kept_by(self, policy: Remat) -> list[str]:
        """The period's activations that a policy keeps by name."""
        assert not isinstance(policy, Mapping)
        named = {"full": (), "minimal": self.none.names}.get(policy, policy) if isinstance(policy, str) else policy
        return [name for name in self.none.names if name in named]

    def _again(self, names: Collection[str]) -> tuple[float, float, float]:
        """What `Under` says is computed again; of weights and attention alike where no kernel tells these apart."""
        found, least = self.none.replay.again(names), self.none.flops - self.none.attention
        whole = self.forward * (1 + self.backward)
        of_weights = (whole - 3 * self.own) / (self.forward - self.own)
        repeated = (found.flops - found.attention) / self.seq / least * of_weights
        again = min(1.0, found.attention / self.seq / self.own) if self.own else repeated
        return repeated, again, found.summed / self.seq

    @cached_property
    def reductions(self) -> tuple[ParamSpec, ...]:
        """The weights that end a branch of the stream: they sum over an axis that is no `embed`."""
        return tuple(
            spec
            for spec in self.matrices.values()
            if len(spec.own) > 1 and spec.own[-1].startswith("embed") and not spec.inputs[0].startswith("embed")
        )


@dataclass(frozen=True)
class Work:
    """A training step of `program`, whatever the layout.

    Args:
        periods: of each segment. outer: path → the weights around the layers. head: FLOPs of a token in it, forward and
            backward. frozen: paths of the weights that do not train. rounded: of those that are gathered in 8 bits, and
            in which share of their layers.
        state: parameters, optimizer state and variables in axes. compute, reduce: bytes of an element of a weight as it
            is multiplied, and of a gradient as it is summed. model_flops: of a token, forward and backward.
    """

    program: Program
    periods: tuple[Period, ...]
    outer: Mapping[str, ParamSpec]
    head: float
    frozen: frozenset[str]
    rounded: Mapping[str, float]
    compute: int
    reduce: int

    @classmethod
    def of(cls, program: Program) -> "Work":
        """The work of a program on one described device of the target's platform.

        Raises `UserError` for a model whose layers no schedule could cut: one that is no `LanguageModel`.
        """
        module, runtime = program.module, program.runtime
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"axon plan knows the layers of an axon.nn.LanguageModel, and {type(runtime.model).__name__}.build() "
                f"gives a {type(module).__name__}: see what one layout takes with `axon compile`"
            )
        frozen, rounded = frozen_paths(program.optimizer, program.parameters), _rounded(runtime)
        segments = range(len(module.layers.spans))
        periods = tuple(_period(program, number, frozen, rounded) for number in segments)
        outer = {path: spec for path, spec in runtime.parameters.items() if not path.startswith(LAYERS)}
        compute, reduce = (jnp.dtype(t).itemsize for t in (runtime.compute_dtype, runtime.precision.reduce_dtype))
        parts = module.flops_by_part(program.seq)
        products = 2 if ("embedding/table" if module.tied else "head") in frozen else 3
        head = products * parts["head"] + 3 * parts["mtp"]
        return cls(program, periods, outer, head, frozen, rounded, compute, reduce)

    @property
    def state(self) -> Mapping[str, list[ArraySpec]]:
        """Kind → what is kept from step to step, in axes."""
        specs = self.program.specs
        parts = {"parameters": specs.parameters, "optimizer": specs.optimizer, "variables": specs.variables}
        return {kind: jax.tree.leaves(tree) for kind, tree in parts.items()}

    @cached_property
    def names(self) -> frozenset[str]:
        """The activations that have names."""
        return frozenset().union(*(period.none.names for period in self.periods))

    def policy(self, names: Collection[str]) -> Remat:
        """The policy, as `kept` has it, by which these are kept of a block besides its input."""
        if not names:
            return "full"
        return "minimal" if self.names <= set(names) else tuple(sorted(names))

    @property
    def embed(self) -> int:
        return self.program.module.dims["embed"]

    @property
    def model_flops(self) -> float:
        """Of a step, by `axon.observe.mfu.FORMULA`."""
        return self.program.flops_per_token * self.program.batch * self.program.seq


def _rounded(runtime: Runtime) -> dict[str, float]:
    """Path of each weight whose products the run's recipe makes in 8 bits → the share of its layers that do so."""
    if (recipe := runtime.precision.recipe) is None:
        return {}
    transform = LowPrecision(recipe)
    taken = {path for path, spec in runtime.declared.items() if transform.fits(path, spec)}
    params = {"/".join(map(str, path)): one for path, one in nnx.to_flat_state(nnx.state(runtime.module, Param))}
    return {p: _share(recipe, one) for p, one in params.items() if STORED in p and p.partition(STORED)[0] in taken}


def _share(recipe: Recipe, weight: Param) -> float:
    if not weight.layers:
        return 1.0
    return 1 - len(recipe.excepted_layers(weight.num_layers).intersection(weight.layers)) / len(weight.layers)


def _period(program: Program, number: int, frozen: frozenset[str], rounded: Mapping[str, float]) -> Period:
    depth, seq = program.module.layers, program.seq
    kinds = depth.spans[number].kinds
    declared, stored = (_of_kinds(specs, kinds) for specs in (program.runtime.declared, program.parameters))
    blocks = {kind: depth.blocks[kind] for kind in kinds}
    each = [forward_flops(block, seq) for block in blocks.values()]
    forward = sum(each)
    attention = sum(_over_pairs(block, seq) for block in blocks.values())
    whole = sum(training_flops(b, seq, paths_in(f"{LAYERS}{kind}", frozen)) for kind, b in blocks.items())
    routers = [m for block in blocks.values() for _, m in nnx.iter_modules(block) if isinstance(m, ChoosesExperts)]
    copies, chosen = max(((k, k / experts) for k, experts in (one.chosen_experts for one in routers)), default=(1, 1.0))
    by_block = attention_by_block(program.module)
    none, full = (trace(program, number, frozen, policy, copies) for policy in ("none", "full"))
    narrow = [(spec, rounded[path]) for path, spec in stored.items() if path in rounded]
    dispatched = max((share for spec, share in narrow if "experts" in spec.own), default=0.0)
    return Period(
        times=depth.spans[number].times,
        seq=seq,
        matrices=declared,
        weights=stored,
        chosen=chosen,
        forward=forward,
        backward=whole / forward - 1,
        attention=attention,
        largest=max(each) / forward,
        narrow=sum(share * matrix_flops(spec, chosen) for spec, share in narrow) / forward,
        rounded_elements=sum(share * _operands(spec, copies) for spec, share in narrow),
        dispatched=1 - dispatched * (1 - 1 / program.runtime.compute_dtype.itemsize),
        none=none,
        full=full,
        own=attention if none.attention else 0.0,
        attentions=tuple(one for kind in kinds for one in sorted(by_block.get(kind, ()), key=str)),
    )


def _over_pairs(block: nnx.Module, seq: int) -> int:
    """FLOPs of a token in the attention of a block's modules, but for their matrices."""
    own = (m for _, m in nnx.iter_modules(block) if isinstance(m, NamesActivations) and ATTENTION in m.remat_names)
    return sum(forward_flops(one, seq) - matmul_flops(one) for one in own)


def _of_kinds(specs: Mapping[str, ParamSpec], kinds: Iterable[str]) -> dict[str, ParamSpec]:
    """The parameters of some kinds of block."""
    return {path: spec for path, spec in specs.items() if path.startswith(tuple(f"{LAYERS}{kind}/" for kind in kinds))}


def matrix_flops(spec: ParamSpec, chosen: float) -> float:
    """Forward FLOPs of a token's product with one layer's matrix; of experts with those that are chosen."""
    return 2 * math.prod(spec.shape[spec.stack :]) * (chosen if "experts" in spec.own else 1.0)


def _operands(spec: ParamSpec, copies: int) -> int:
    """Elements of a token in a matrix's input and output; of experts of each of its copies."""
    inputs = math.prod(size for name, size in zip(spec.axes, spec.shape, strict=True) if name in spec.inputs)
    outputs = math.prod(spec.shape[spec.stack :]) // inputs
    return copies * (inputs + outputs // experts_in(spec)) if "experts" in spec.own else inputs + outputs


def experts_in(spec: ParamSpec) -> int:
    """How many experts an experts' weight is of."""
    return dict(zip(spec.axes, spec.shape, strict=True))["experts"]
