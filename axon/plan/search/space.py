"""The layouts and executions that are tried."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from axon.axes import Execution
from axon.axes.execution import INPUT, OFFLOAD
from axon.chips.target import Target
from axon.layout import Layout, sequence_parallel
from axon.layout.table import ULYSSES, Rows, Schedule
from axon.nn.capabilities import HasDims
from axon.parallel.context import AttentionKind, Split, exchange_problem, ring_problem
from axon.parallel.pipeline import Interleaved, OneFOneB, ZeroBubbleH1
from axon.plan.search.tables import Matrix, table
from axon.runtime.context import attention_by_block
from axon.train.step import Program

_OF_ROWS = ("rows", "params", "zero", "context", "overlap", "replicate_kv")
"""Fields of a layout that follow from its mesh, or are chosen with it."""

LONG = 16_384
"""Positions from which on a sequence may be split over mesh axis `context`."""

MOST_STAGES = {"tpu": 8, "gpu": 32, "cpu": 8}
"""Stages that are tried: on a torus, whose links are all fast, few are worth while."""

CONTEXT_AXES = ("context", ULYSSES)
"""The mesh axes that split a sequence."""

MOST_TENSOR = 16
MOST_CELLS = 2**13
"""Pieces of work in a pipeline's table that is tried: one of more takes seconds to make."""


@dataclass(frozen=True)
class Pins:
    """What a plan must have: fields of `Layout` and of `Execution`. Of a mesh and of rows, the axes that are named."""

    layout: Mapping[str, Any] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)

    def without(self, name: str) -> "Pins":
        """The same but for one, by its name in a config, as `Layout.zero`."""
        of, _, own = name.partition(".")
        drop = {n: v for n, v in (self.layout if of == "Layout" else self.execution).items() if n != own}
        return replace(self, layout=drop) if of == "Layout" else replace(self, execution=drop)

    @property
    def names(self) -> list[str]:
        return [f"Layout.{name}" for name in self.layout] + [f"Execution.{name}" for name in self.execution]

    def allow_mesh(self, mesh: Mapping[str, int]) -> bool:
        wanted = self.layout.get("mesh", {})
        return all(size in (-1, mesh.get(axis, 1)) for axis, size in wanted.items())

    def allow(self, name: str, value: Any) -> bool:
        """Whether a field of the layout may be `value`: of rows those that are named."""
        if name == "rows":
            return all(value.get(axis) == row for axis, row in self.layout.get(name, {}).items())
        return name not in self.layout or self.layout[name] == value


@dataclass(frozen=True)
class Space:
    """All that is tried for a model on a machine.

    Args:
        program: of the model, on any layout. start: the layout whose other fields plans have.
        offloads: whether activations may be sent to the host, which is tried where a layout does not fit without
            remat; hosts: kinds of array in the host's memory that are tried likewise, beside the execution's own.
        matrices: of the model, by which axes are split that the default table does not know or cannot split.
    """

    program: Program
    target: Target
    start: Layout
    execution: Execution
    pins: Pins = Pins()
    matrices: tuple[Matrix, ...] = ()
    offloads: bool = False
    hosts: tuple[tuple[str, ...], ...] = ()

    def layouts(self) -> Iterator[Layout]:
        """The layouts that differ in where arrays live: of one microbatch and the default schedule."""
        for mesh in self.meshes():
            if self.pins.allow_mesh(mesh):
                yield from self._of_mesh(mesh)

    def meshes(self) -> Iterator[dict[str, int]]:
        """Mesh axes whose sizes multiply to the target's devices, and that divide what they split."""
        count = self.target.devices
        for tensor in _divisors(count, self._most_tensor):
            if not self._tables[tensor]:
                continue
            for pipe in _divisors(count // tensor, min(MOST_STAGES[self.target.platform], self._depth)):
                for context, ulysses in self._contexts(count // tensor // pipe):
                    left = count // tensor // pipe // context // ulysses
                    for expert in self._experts(left):
                        if self.program.batch % left == 0:
                            sizes = {"pipe": pipe, "data": left // expert, "expert": expert, "context": context}
                            sizes |= {ULYSSES: ulysses, "tensor": tensor}
                            yield {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}

    def runs(self, layout: Layout) -> Iterator[Layout]:
        """A layout with each number of microbatches and schedule."""
        stages = layout.mesh.get("pipe", 1)
        sequences = self.program.batch // (layout.mesh.get("data", 1) * layout.mesh.get("expert", 1))
        for micro in _microbatches(sequences, stages):
            for schedule in self._schedules(stages, micro):
                virtual = schedule.virtual if schedule else 1
                pads = stages > 1 and any(times % (stages * virtual) for times in self._times)
                made = replace(layout, microbatches=micro, schedule=schedule, pad_layers=pads)
                if all(self.pins.allow(name, getattr(made, name)) for name in ("microbatches", "schedule")):
                    yield made

    @property
    def placements(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of array in the host's memory that are tried, those of the execution's own first."""
        return self.execution.host, *self.hosts

    @property
    def smallest_execution(self) -> Execution:
        """The one with which a device has least."""
        remat = self.pins.execution.get("remat", {INPUT: OFFLOAD} if self.offloads else "full")
        return replace(self.execution, remat=remat, host=self.placements[-1])

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _of_mesh(self, mesh: dict[str, int]) -> Iterator[Layout]:
        tensor, context = mesh.get("tensor", 1), tuple(a for a in CONTEXT_AXES if a in mesh)
        for zero, method in product(self._stages_of_zero(mesh), self._methods(mesh)):
            for split, (rows, overlap) in product(self._tables[tensor], self._streams(mesh)):
                over = {"embed": ("data", *context)} if context and zero == 3 else {}
                made = replace(
                    self.start,
                    mesh=mesh,
                    rows={**self.start.rows, **split, **rows},
                    params={**self.start.params, **over},
                    zero=zero,
                    replicate_kv=self._replicate_kv(tensor) if split.get("heads", "tensor") else 1,
                    context=method,
                    overlap=overlap,
                )
                if all(self.pins.allow(name, getattr(made, name)) for name in _OF_ROWS):
                    yield made

    def _streams(self, mesh: Mapping[str, int]) -> list[tuple[Rows, tuple[str, ...]]]:
        """Rows of the stream between blocks, and which mesh axes' gathers are rings: those that split it so too."""
        size = mesh.get("tensor", 1)
        found: list[tuple[Rows, tuple[str, ...]]] = [({}, ())]
        if size > 1 and self.program.seq % (size * math.prod(mesh.get(a, 1) for a in CONTEXT_AXES)) == 0:
            found += [(sequence_parallel(), overlap) for overlap in sorted({(), self.pins.layout.get("overlap", ())})]
        return found

    def _methods(self, mesh: Mapping[str, int]) -> Sequence[str | None]:
        """How attention may see whole sequences on a mesh."""
        ring, swap = (mesh.get(axis, 1) for axis in CONTEXT_AXES)
        if ring * swap == 1:
            return [None]
        kinds = [one for period in self._attentions for one in period]
        split = Split(self.program.seq, ring, swap, mesh.get("tensor", 1))
        rings = ring == 1 or ring_problem(kinds, ring, split.seq) is None
        if swap > 1:
            return ["usp"] if rings and exchange_problem(kinds, split, swap) is None else []
        found = ["ring"] * rings + ["ulysses"] * (exchange_problem(kinds, split, ring) is None)
        return [*found, "gather"] if not found or self.pins.layout.get("context") == "gather" else found

    @property
    def _attentions(self) -> list[set[AttentionKind]]:
        return list(attention_by_block(self.program.module).values())

    def _contexts(self, count: int) -> Iterator[tuple[int, int]]:
        """Sizes of the mesh axes that split a sequence: of `ulysses` where both do."""
        for size in _divisors(count, self._most_context):
            yield from ((size // swap, swap) for swap in _divisors(size // 2, size) if size % swap == 0)
            if size == 1:
                yield 1, 1

    def _stages_of_zero(self, mesh: Mapping[str, int]) -> list[int]:
        """0, 1 and 3: by prediction the second is as the first, since gradients are summed where the parameters are."""
        if mesh.get("data", 1) == 1:
            return [0]
        return [0, 1, 3] if self.pins.layout.get("zero") != 2 else [2]

    @property
    def _dims(self) -> Mapping[str, int]:
        module = self.program.module
        return module.dims if isinstance(module, HasDims) else {}

    @property
    def _most_tensor(self) -> int:
        near = self.target.linked
        return min(near, MOST_TENSOR if self.target.chip.torus else self.target.chip.host)

    @cached_property
    def _tables(self) -> Mapping[int, list[Rows]]:
        """Size of `tensor` → rows of what it splits: the default ones where they divide, and the fastest if others."""
        itemsize = self.program.runtime.compute_dtype.itemsize
        sizes = _divisors(self.target.devices, self._most_tensor)
        pinned = self.pins.layout.get("rows", ())
        own = {n: table(self.matrices, self.target, n, itemsize, pinned) if n > 1 else {} for n in sizes}
        return {n: [{}] * self._splits_widths(n) + [own[n]] * bool(own[n]) for n in sizes}

    @property
    def _most_context(self) -> int:
        seq, pins = self.program.seq, self.pins.layout
        if seq >= LONG:
            return seq // (LONG // 8)
        return seq if pins.get("context") or set(CONTEXT_AXES) & set(pins.get("mesh", ())) else 1

    @property
    def _times(self) -> list[int]:
        return [span.times for span in self.program.module.layers.spans]

    @property
    def _depth(self) -> int:
        return sum(self._times)

    def _splits_widths(self, tensor: int) -> bool:
        widths = [size for name, size in self._dims.items() if name in ("heads", "mlp", "vocab")]
        kv_heads = self._dims.get("kv_heads", tensor)
        return all(size % tensor == 0 for size in widths) and (kv_heads % tensor == 0 or tensor % kv_heads == 0)

    def _replicate_kv(self, tensor: int) -> int:
        return tensor // math.gcd(self._dims.get("kv_heads", tensor), tensor)

    def _experts(self, count: int) -> list[int]:
        experts = self._dims.get("experts", 1)
        return [size for size in _divisors(count, experts) if experts % size == 0]

    def _schedules(self, stages: int, microbatches: int) -> Iterator[Schedule | None]:
        if stages == 1:
            yield None
            return
        yield OneFOneB()
        if 3 * stages * microbatches <= MOST_CELLS:
            yield ZeroBubbleH1()
        for virtual, split in product((2, 4, 8), (False, True)):
            cells = (3 if split else 2) * stages * virtual * microbatches
            if -(-self._depth // stages) >= virtual and microbatches % stages == 0 and cells <= MOST_CELLS:
                yield Interleaved(virtual, split)


def _microbatches(sequences: int, stages: int) -> list[int]:
    """Numbers that divide a device's sequences: powers of two, of a pipeline up to four times its stages."""
    first, last = (stages, 4 * stages) if stages > 1 else (1, 64)
    found = [n for n in _divisors(sequences, last) if n >= first and n & (n - 1) == 0]
    return found or [n for n in _divisors(sequences, last) if n >= first][:1]


def _divisors(count: int, most: int) -> list[int]:
    return [n for n in range(1, min(count, most) + 1) if count % n == 0]
