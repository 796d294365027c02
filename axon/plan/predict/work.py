"""What a training step does, from the model's own declarations: nothing here depends on a layout.

A period of each segment of layers is traced for one sequence on one device: what its backward keeps under each remat
policy is what JAX keeps, and FLOPs are those of its program.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

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
from axon.plan.predict.policies import names_by_module
from axon.plan.predict.traced import LAYERS, Kept, Traced, trace
from axon.precision import Recipe
from axon.runtime import Runtime
from axon.train.optimizers import frozen_paths
from axon.train.step import Program

STORED = "/base"


@dataclass(frozen=True)
class Period:
    """One period of a segment, which is repeated `times`.

    Args:
        matrices: path → one layer's weights, as the model declares them. weights: as they are stored, of which a
            transform may have made several. chosen: the share of experts that multiply a token.
        forward: FLOPs of a token. backward: of it too, ÷ `forward`. attention: of the forward's, those over pairs of
            tokens. largest: the share of the largest layer.
        narrow: the share of 8-bit products. rounded_elements: of a token, in their operands. dispatched: bytes of an
            element that is sent to its expert, ÷ those of one in the compute dtype.
        kept: of each policy. repeated: of each policy the share of the forward that the backward computes again, but
            for attention over pairs, of which `again` is that share. waits: of each policy what waits in a pipeline's
            slots, but for the period's input. left: of each policy what the part of a split backward for the inputs
            leaves for that for the weights.
    """

    times: int
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
    kept: Mapping[Remat, Kept]
    waits: Mapping[Remat, Kept]
    left: Mapping[Remat, Kept]
    repeated: Mapping[Remat, float]
    again: Mapping[Remat, float]

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
    def of(cls, program: Program, policies: Iterable[Remat]) -> "Work":
        """The work of a program on one described device of the target's platform.

        Raises `UserError` for a model whose layers no schedule could cut: one that is no `LanguageModel`.
        """
        module, runtime = program.module, program.runtime
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"axon plan knows the layers of an axon.nn.LanguageModel, and {type(runtime.model).__name__}.build() "
                f"gives a {type(module).__name__}: see what one layout takes with `axon compile`"
            )
        policies = tuple(policies)
        frozen, rounded = frozen_paths(program.optimizer, program.parameters), _rounded(runtime)
        segments = range(len(module.layers.spans))
        periods = tuple(_period(program, number, policies, frozen, rounded) for number in segments)
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
        """The activations that modules name."""
        return frozenset().union(*names_by_module(self.program).values())

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


def _period(
    program: Program, number: int, policies: tuple[Remat, ...], frozen: frozenset[str], rounded: Mapping[str, float]
) -> Period:
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
    traced = {policy: trace(program, number, frozen, policy, copies) for policy in policies}
    repeated, again = _repeated(traced, forward, whole, attention)
    narrow = [(spec, rounded[path]) for path, spec in stored.items() if path in rounded]
    dispatched = max((share for spec, share in narrow if "experts" in spec.own), default=0.0)
    return Period(
        times=depth.spans[number].times,
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
        kept={policy: one.kept for policy, one in traced.items()},
        waits={policy: one.waits for policy, one in traced.items()},
        left={policy: one.left for policy, one in traced.items()},
        repeated=repeated,
        again=again,
    )


def _repeated(
    traced: Mapping[Remat, Traced], forward: float, whole: float, attention: float
) -> tuple[dict[Remat, float], dict[Remat, float]]:
    """Of each policy the shares of the forward that the backward computes again: of what multiplies weights, and of
    attention over pairs; one for both where no kernel of attention tells them apart."""
    kernels = {policy: one.attention for policy, one in traced.items()}
    own = attention if any(kernels.values()) else 0.0
    plain = {policy: one.flops - kernels[policy] for policy, one in traced.items()}
    least, of_weights = min(plain.values()), (whole - 3 * own) / (forward - own)
    repeated = {policy: max(0.0, (flops / least - 1) * of_weights) for policy, flops in plain.items()}
    if not own:
        return repeated, repeated
    return repeated, {policy: min(1.0, (one - min(kernels.values())) / own) for policy, one in kernels.items()}


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
