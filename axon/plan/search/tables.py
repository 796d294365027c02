"""Rows for the axes of any model: which of them mesh axis `tensor` splits, by an integer program (Alpa, Zheng et al.,
OSDI 2022, arXiv:2201.12023).

Alpa chooses the sharding of every operator, and pays for what moves between two that do not agree. Here matrices agree
by name: an axis is split in all of them or in none, and what moves is the sum over an axis that a product contracts. So
there is a variable for each axis, and a matrix has at most one axis that is split.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from axon.axes.patterns import base
from axon.chips.target import Target
from axon.layout.table import DEFAULT_ROWS, Row
from axon.nn.param import ParamSpec
from axon.plan.predict.links import Bandwidths, Links
from axon.plan.predict.work import Work

TENSOR = "tensor"
FOLLOWS = {"kv_heads": "heads"}
"""Axis → the one that it is split with; heads of keys that are too few are copied (`Layout.replicate_kv`)."""

TOKENS = 8192
"""Of a microbatch, over which the latency of a collective is spread."""

SHARDABLE = frozenset(name for name, row in DEFAULT_ROWS.items() if TENSOR in row) | {"embed"}
"""Axes of the default table that may be split; the others with a row there never are. So may all of a model's own."""


class Matrix(NamedTuple):
    """A layer's matrix, how many layers have it, and the share of tokens that it multiplies."""

    spec: ParamSpec
    times: int
    chosen: float = 1.0

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.spec.own, self.spec.shape[self.spec.stack :], strict=True))

    @property
    def free(self) -> frozenset[str]:
        """The axes that may be split, each by the name that decides it."""
        return frozenset(_decided_by(name) for name in self.spec.own if _may_split(name))

    @property
    def outputs(self) -> int:
        """Elements of a token that it makes."""
        return math.prod(size for name, size in self.sizes.items() if name not in (*self.spec.inputs, "experts"))


def matrices_of(work: Work) -> tuple[Matrix, ...]:
    """All matrices of a model, those around its layers too; a tied embedding once as a table, once as the head."""
    layers = [(spec, one.times, one.chosen) for one in work.periods for spec in one.matrices.values()]
    found = [Matrix(spec, times, chosen if "experts" in spec.own else 1.0) for spec, times, chosen in layers]
    found += [Matrix(spec, 1) for spec in work.outer.values()]
    if work.program.module.tied:
        found.append(Matrix(replace(work.outer["embedding/table"], inputs=("embed",)), 1))
    return tuple(one for one in found if len(one.spec.own) > 1)


def table(
    matrices: Sequence[Matrix], target: Target, tensor: int, itemsize: int, pinned: Collection[str] = ()
) -> Mapping[str, Row]:
    """The rows of the fastest table that splits something, where they differ from the default ones.

    Each axis that is split divides the products of the matrices that have it, and those that contract it sum what they
    make over the mesh axis, forward, and their input's gradient backward. `itemsize`: bytes of an activation's element.
    `pinned`: axes whose rows are not to be chosen.
    """
    names = [name for name in _candidates(matrices, tensor) if name not in pinned]
    if not names:
        return {}
    worth = np.array([gain(matrices, name, target, tensor, itemsize) for name in names])
    worth /= np.abs(worth).max() or 1.0  # HiGHS takes what is below 1e-7 for nothing, as seconds of a token are
    once = [[float(name in one.free) for name in names] for one in matrices]
    found = milp(-worth, integrality=np.ones(len(names)), bounds=Bounds(0, 1), constraints=LinearConstraint(once, ub=1))
    split = {name for name, value in zip(names, found.x, strict=True) if value > 0.5}
    whole = _uneven(matrices, [*names, *pinned])
    rows: dict[str, Row] = {name: TENSOR if name in split else None for name in (*names, *whole)}
    rows |= {name: rows[leader] for name, leader in FOLLOWS.items() if leader in rows}
    return {name: row for name, row in rows.items() if row != _otherwise(name, rows)} if split else {}


def gain(matrices: Iterable[Matrix], name: str, target: Target, tensor: int, itemsize: int) -> float:
    """Seconds of a token that splitting an axis saves: of products, less those of the sums that it asks for."""
    links = Links(target, {TENSOR: tensor}, Bandwidths.of(target))
    return sum(one.times * _gain(one, name, links, itemsize) for one in matrices if name in one.free)


def _candidates(matrices: Iterable[Matrix], tensor: int) -> list[str]:
    """The axes that may be split, and divide."""
    sizes = [(name, size) for one in matrices for name, size in one.sizes.items() if name in one.free]
    uneven = {name for name, size in sizes if size % tensor}
    return list(dict.fromkeys(name for name, _ in sizes if name not in uneven))


def _uneven(matrices: Iterable[Matrix], names: Iterable[str]) -> list[str]:
    """Axes that the default table would split, and that do not divide."""
    found = (name for one in matrices for name in one.spec.own if _may_split(name) and name not in FOLLOWS)
    return [name for name in dict.fromkeys(found) if name not in names]


def _gain(matrix: Matrix, name: str, links: Links, itemsize: int) -> float:
    """Of one layer's matrix, in its three products."""
    chip, tensor = links.target.chip, links.mesh[TENSOR]
    looked_up = "vocab" in matrix.spec.inputs
    products = 0.0 if looked_up else 6 * math.prod(matrix.sizes.values()) * matrix.chosen / (chip.peak * chip.sustained)
    contracted = name in map(_decided_by, matrix.spec.inputs)
    sums = (2 if looked_up else 4) * contracted  # gathers; of the head's input none, as a loss sums numbers
    return products * (1 - 1 / tensor) - sums * links.gather((TENSOR,), matrix.outputs * itemsize * TOKENS) / TOKENS


def _otherwise(name: str, rows: Mapping[str, Row]) -> Row:
    """The row that an axis has if a table does not say: that of the name without its role, or the default one."""
    own = base(name)
    if name != own and own in rows:
        return rows[own]
    return TENSOR if TENSOR in DEFAULT_ROWS.get(own, ()) else None


def _may_split(name: str) -> bool:
    return base(name) in SHARDABLE or base(name) not in DEFAULT_ROWS


def _decided_by(name: str) -> str:
    return FOLLOWS.get(name, name)
