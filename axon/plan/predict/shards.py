"""What a device has of a step's work under a layout."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from axon.axes import ArraySpec, Execution
from axon.axes.execution import INPUT, OFFLOAD, SAVE, Remat, is_policy
from axon.axes.patterns import Names, base
from axon.layout import KINDS, Layout, Placement
from axon.layout.table import Schedule
from axon.nn.param import ParamSpec
from axon.parallel.pipeline import Action, OneFOneB, lockstep
from axon.parallel.pipeline.partition import partition, width
from axon.parallel.pipeline.rows import Pools, rows
from axon.plan.predict.kernels import ExpertsWork
from axon.plan.predict.traced import STREAM, Kept
from axon.plan.predict.work import Period, Work, experts_in, matrix_flops
from axon.train.optimizers import update_flops

PIPE = "pipe"


class Gathered(NamedTuple):
    """Weights of one layer, or around the layers, as they are used: bytes a device, and how they get there.

    `size`: as they are gathered. `trained`: elements of those that have gradients. `axes`: mesh axes that they are
    gathered over, and over which their gradients are reduced to parts. `summed`: mesh axes over which gradients are
    summed besides.
    """

    size: float
    trained: float
    axes: Names
    summed: Names


class Waits(NamedTuple):
    """What waits between forward and backward, as policies that keep all on the device: `computed` by what is not
    computed again, `here` by what waits on the device; `input`: whether a block's input waits on the host."""

    computed: Remat
    here: Remat
    input: bool


class _Under(NamedTuple):
    """Of a policy and a period, bytes of a token: kept; waiting, and of these what all layers share; left between the
    parts of a split backward. `again`: what is computed again."""

    kept: float
    waits: float
    shared: float
    left: float
    again: tuple[float, float, float]


class Run(NamedTuple):
    """A pipeline's table as one program runs it: ticks by `Action`, and slots."""

    ticks: tuple[int, ...]
    pools: Pools


@dataclass(frozen=True, eq=False)
class Split:
    """`work` under the rows of a placement's layout, however many microbatches it has and however its stages run.

    Each number is of one device.
    """

    work: Work
    placement: Placement

    @cached_property
    def stages(self) -> int:
        return self.placement.mesh.shape.get(PIPE, 1)

    @cached_property
    def batch_axes(self) -> Names:
        """The mesh axes that split tokens: gradients are summed over these."""
        return (*self.placement.mesh_axes("batch"), *self.placement.mesh_axes("seq"))

    @cached_property
    def tensor_axes(self) -> Names:
        """The mesh axes that split the blocks' widths, with those that copy heads of keys."""
        matrices = [spec for period in self.work.periods for spec in period.matrices.values() if len(spec.own) > 1]
        used = dict.fromkeys(a for spec in matrices for a in self._used(spec.own))
        return tuple(a for a in used if a not in (*self.batch_axes, *self.placement.mesh_axes("experts", "params")))

    @cached_property
    def expert_axes(self) -> Names:
        """The mesh axes over which tokens are sent to experts."""
        return tuple(a for a in self.placement.mesh_axes("experts", "params") if a in self.batch_axes)

    @cached_property
    def context_axes(self) -> Names:
        return self.placement.mesh_axes("seq")

    @cached_property
    def tokens(self) -> float:
        """Of a step, where a block's widths are split."""
        return self.work.program.batch * self.work.program.seq / self.size(self.batch_axes)

    @cached_property
    def stream_split(self) -> float:
        """Over how many devices besides the stream between blocks is split."""
        own = self.size(self.placement.mesh_axes("seq.residual")) / self.size(self.context_axes)
        return own * self.placement.num_shards("embed")

    def kept(self, number: int, remat: Remat) -> float:
        """Bytes that a period of a segment keeps of a token under a policy."""
        return self._under(number, remat).kept

    def left(self, number: int, remat: Remat) -> float:
        """Bytes of a token that wait in a period between the two parts of a split backward."""
        return self._under(number, remat).left

    def waits(self, number: int, remat: Remat) -> float:
        """Bytes of a token that wait of a period."""
        return self._under(number, remat).waits

    def again(self, number: int, remat: Remat) -> tuple[float, float, float]:
        """What a period's backward computes again: see `axon.plan.predict.work.Under`."""
        return self._under(number, remat).again

    @cached_property
    def rows(self) -> tuple[float, ...]:
        """Of each segment, of what a period keeps without remat, bytes of a token in rows of experts."""
        return tuple(self._of(Kept({}, period.none.kept.rows)) for period in self.work.periods)

    @property
    def capacity(self) -> float:
        """Rows of experts that a device has room for, ÷ those of a balanced load."""
        return self.work.program.runtime.execution.capacity_factor if self.overflows else 1.0

    @cached_property
    def overflows(self) -> bool:
        """Whether a load of experts may take more than a round: where devices share them."""
        return self.size(self.placement.mesh_axes("experts", "params")) > 1

    @cached_property
    def inputs(self) -> tuple[float, ...]:
        """Of each segment, bytes of a token in the inputs of a period's blocks."""
        return tuple(period.full.kept.bytes[STREAM] / self.stream_split for period in self.work.periods)

    def waiting(self, remat: Remat, periods: Callable[[int], float]) -> float:
        """Bytes that wait of a token in so many periods of each segment, on stages without the periods' inputs: what is
        the same for all layers waits once."""
        found = [(self._under(number, remat), periods(number)) for number in range(len(self.work.periods))]
        return sum(one.waits * times - one.shared * max(0.0, times - 1) for one, times in found)

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """Of each segment, forward FLOPs of one of the device's tokens in a period."""
        return tuple(self._flops(period) for period in self.work.periods)

    @cached_property
    def attention(self) -> tuple[float, ...]:
        """Of `flops`, those of attention over pairs of tokens."""
        return tuple(one.attention / self.size(self.placement.mesh_axes("heads")) for one in self.work.periods)

    @cached_property
    def experts(self) -> tuple[ExpertsWork, ...]:
        """Of `flops`, those of experts, by one of the device's tokens."""
        return tuple(self._experts(period) for period in self.work.periods)

    @cached_property
    def weights(self) -> tuple[list[Gathered], ...]:
        """Of each segment, the weights of a period."""
        return tuple(self.gathered(period.weights) for period in self.work.periods)

    @cached_property
    def outer(self) -> list[Gathered]:
        """The weights around the layers, each by itself."""
        return [one for path, spec in self.work.outer.items() for one in self.gathered({path: spec})]

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Of each segment, how many branches of a period end in a sum over mesh axes that split widths."""
        return tuple(
            sum(any(a in self.tensor_axes for a in self._used(spec.own)) for spec in period.reductions)
            for period in self.work.periods
        )

    @cached_property
    def divides(self) -> bool:
        """Whether every axis of every parameter, but the layers, divides over the devices that split it."""
        sizes = {
            (name, size)
            for spec in self.work.program.parameters.values()
            for name, size in zip(spec.axes, spec.shape, strict=True)
            if name != "layers"
        }
        return all(size % self.placement.num_shards(name, kind) == 0 for name, size in sizes for kind in KINDS)

    @cached_property
    def state(self) -> Mapping[str, float]:
        """Kind → bytes that are kept from step to step."""
        return {kind: self.bytes(specs) for kind, specs in self.work.state.items()}

    @cached_property
    def gradients(self) -> float:
        """Bytes of one gradient of each parameter that trains. They are summed where the parameters are, and only the
        last sum is moved to the rows of `grads`."""
        parameters, frozen = self.work.program.parameters, self.work.frozen
        return self.bytes(spec for path, spec in parameters.items() if path not in frozen)

    @cached_property
    def update_flops(self) -> float:
        """FLOPs of the products in an update, of which the devices that split a matrix's state have even shares."""
        parameters = self.work.program.parameters
        shares = {path: replace(spec, kind="optimizer") for path, spec in parameters.items()}
        flops = update_flops(self.work.program.optimizer, parameters)
        return sum(n * self.placement.bytes_per_device(shares[path]) / shares[path].nbytes for path, n in flops.items())

    @cached_property
    def exchanged(self) -> tuple[float, ...]:
        """Of each segment, copies of a token on their way to the experts that others have."""
        return tuple(self._copies(period) if self.expert_axes else 0.0 for period in self.work.periods)

    @cached_property
    def keys(self) -> tuple[float, ...]:
        """Of each segment, elements of keys and values of a token in a period."""
        keys = [[s for s in period.matrices.values() if "kv_heads" in s.own] for period in self.work.periods]
        return tuple(sum(map(self._elements, own)) / self.work.embed for own in keys)

    @cached_property
    def queries(self) -> tuple[float, ...]:
        """Of each segment, elements of a token's queries in a layer."""
        heads = [[s for s in period.matrices.values() if "heads" in s.own] for period in self.work.periods]
        return tuple(max(map(self._elements, own), default=0.0) / self.work.embed for own in heads)

    def bytes(self, specs: Iterable[ArraySpec], kind: str | None = None) -> float:
        """Bytes of the shards of `specs`, of their own kind of array or another. Of layers each stage of a pipeline
        stores as many as any."""
        return sum(spec.nbytes * self._padding(spec) / self._shards(spec.axes, kind or spec.kind) for spec in specs)

    def gathered(self, weights: Mapping[str, ParamSpec]) -> list[Gathered]:
        """Weights, by path, as a device uses them: those with the same mesh axes together."""
        found: dict[tuple[Names, Names], tuple[float, float]] = {}
        for path, spec in weights.items():
            used = self._used(spec.own)
            stored = [a for name in spec.own for a in self.placement.mesh_axes(name, "params")]
            over = tuple(a for a in stored if a not in used)
            summed = tuple(a for a in self.batch_axes if a not in over and a not in used)
            size, trained = found.get((over, summed), (0.0, 0.0))
            elements = self._elements(spec)
            trained += 0.0 if path in self.work.frozen else elements
            found[over, summed] = size + elements * self._itemsize(path, spec), trained
        return [Gathered(*sizes, *axes) for axes, sizes in found.items()]

    def size(self, mesh_axes: Iterable[str]) -> int:
        """How many devices lie along these mesh axes."""
        return math.prod(self.placement.mesh.shape[axis] for axis in mesh_axes)

    # ---- parts ----------------------------------------------------------------------------------------------------

    @cached_property
    def _under(self) -> "Callable[[int, Any], _Under]":
        return cache(self._under_policy)

    def _under_policy(self, number: int, remat: Any) -> "_Under":
        one = self.work.periods[number].under(remat)
        waits = one.kept if self.stages == 1 else one.waits
        again = one.repeated, one.again, one.summed
        return _Under(self._of(one.kept), self._of(waits), waits.shared, self._of(one.left), again)

    def _of(self, kept: Kept) -> float:
        heads = self.size(self.tensor_axes)
        return kept.of(self.stream_split, heads, self.size(self.placement.mesh_axes("kv_heads")), self.capacity)

    def _elements(self, spec: ParamSpec) -> float:
        """Of one layer's weight while it is used."""
        return math.prod(spec.shape[spec.stack :]) / self.size(self._used(spec.own))

    def _itemsize(self, path: str, spec: ParamSpec) -> float:
        """Bytes of an element as it is gathered: in 8 bits by a recipe, else no wider than it is stored."""
        wide, share = min(self.work.compute, spec.dtype.itemsize), self.work.rounded.get(path, 0.0)
        return wide - share * (wide - 1)

    def _used(self, names: Names) -> Names:
        """The mesh axes that split a weight while it is used: experts stay where they are stored."""
        kinds = {name: "params" if base(name) == "experts" else "activations" for name in names}
        return tuple(dict.fromkeys(a for name in names for a in self.placement.mesh_axes(name, kinds[name])))

    def _flops(self, period: Period) -> float:
        """Experts that others have are multiplied there, by as many tokens as come from there."""
        own = total = 0.0
        for spec in period.matrices.values():
            if len(spec.own) > 1:
                whole = matrix_flops(spec, period.chosen)
                total += whole
                own += whole / self._split_here(spec)
        return own + max(0.0, period.forward - total) / self.size(self.placement.mesh_axes("heads"))

    def _experts(self, period: Period) -> ExpertsWork:
        own = [spec for spec in period.matrices.values() if "experts" in spec.own]
        if not own:
            return ExpertsWork(0.0, 0.0, 0.0, 0.0)
        flops = sum(matrix_flops(spec, period.chosen) / self._split_here(spec) for spec in own)
        groups = experts_in(own[0]) / self.placement.num_shards("experts", "params")
        rows = self._copies(period) / self.size(
            a for a in self.placement.mesh_axes("experts", "params") if a not in self.batch_axes
        )
        return ExpertsWork(flops, rows, groups, self.work.compute * sum(map(self._elements, own)))

    def _split_here(self, spec: ParamSpec) -> int:
        """Over how many devices that have the same tokens a product with this weight is split."""
        return self.size(a for a in self._used(spec.own) if a not in self.batch_axes)

    def _copies(self, period: Period) -> float:
        experts = [spec for spec in period.matrices.values() if "experts" in spec.own]
        return period.chosen * experts_in(experts[0]) if experts else 0.0

    def _padding(self, spec: ArraySpec) -> float:
        """How many layers are stored for each that an array has."""
        count = spec.shape[0] if spec.axes[:1] == ("layers",) else self.stages
        return math.ceil(count / self.stages) * self.stages / count

    def _shards(self, names: Names, kind: str) -> int:
        return math.prod(self.placement.num_shards(name, kind) for name in names)


@dataclass(frozen=True, eq=False)
class Shards:
    """A device's step: `split`, in the microbatches and by the schedule of `layout`, carried out by `execution`."""

    split: Split
    layout: Layout
    execution: Execution

    @cached_property
    def waits(self) -> Waits:
        """By the policy of all kinds of block: the planner has one for all."""
        assert is_policy(self.execution.remat)
        remat: Any = self.execution.remat
        if not isinstance(remat, Mapping):
            return Waits(remat, remat, False)
        saved, sent = ([n for n, a in remat.items() if a == action and n != INPUT] for action in (SAVE, OFFLOAD))
        policy = self.split.work.policy
        return Waits(policy([*saved, *sent]), policy(saved), remat.get(INPUT) == OFFLOAD)

    def under(self, remat: Remat) -> "Shards":
        """The same under another policy."""
        return replace(self, execution=replace(self.execution, remat=remat))

    def sent(self, number: int) -> float:
        """Bytes of a token that a period of a segment sends to the host's memory, and fetches back."""
        computed, here, with_input = self.waits
        named = self.split.kept(number, computed) - self.split.kept(number, here)
        return named + (self.split.inputs[number] if with_input else 0.0)

    @cached_property
    def tokens(self) -> float:
        """Of a microbatch."""
        return self.split.tokens / self.layout.microbatches

    @cached_property
    def stream(self) -> float:
        """Bytes of a microbatch's stream, gathered for a block."""
        return self.tokens * self.split.work.embed * self.split.work.compute

    @cached_property
    def schedule(self) -> Schedule:
        return self.layout.schedule or OneFOneB()

    @cached_property
    def virtual(self) -> int:
        """Chunks of the model on each stage."""
        return self.schedule.virtual if self.split.stages > 1 else 1

    @cached_property
    def run(self) -> Run:
        return _run(self.schedule, self.split.stages, self.layout.microbatches)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of each segment, for how many periods every chunk has places, as the executor cuts the model."""
        periods = self.split.work.periods
        costs = tuple(period.forward for period in periods)
        return _places(tuple(period.times for period in periods), costs, self.split.stages * self.virtual)

    @property
    def splits(self) -> bool:
        """Whether backwards are in two parts."""
        return self.split.stages > 1 and self.run.ticks[Action.BACKWARD_WEIGHT] > 0

    def periods(self, number: int) -> int:
        """How many periods of a segment a device runs, those of places that no layer takes among them."""
        return self.places[number] * self.virtual


@lru_cache(maxsize=512)
def _places(times: tuple[int, ...], costs: tuple[float, ...], chunks: int) -> tuple[int, ...]:
    return tuple(map(width, partition(times, costs, chunks)))


@lru_cache(maxsize=512)
def _run(schedule: Schedule, stages: int, microbatches: int) -> Run:
    table = lockstep(schedule.table(stages, microbatches))
    ticks = np.bincount(table.action.max(axis=1), minlength=len(Action))
    return Run(tuple(ticks.tolist()), rows(table)[1])
