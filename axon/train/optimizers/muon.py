"""Muon: orthogonalised momentum for matrices; AdamW for the rest."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import optax
from jax import Array

from axon import axes
from axon.axes import base
from axon.checks import check_range
from axon.errors import UserError, suggest
from axon.nn import ParamSpec
from axon.train.optimizers.adamw import AdamW
from axon.train.optimizers.descend import descend, joined
from axon.train.optimizers.groups import Group, Parameters, frozen_in
from axon.train.optimizers.matrix import Matrix, as_matrix
from axon.train.optimizers.moments import MomentFormat, Moments
from axon.train.optimizers.newton_schulz import POLAR_EXPRESS, orthogonalize, orthogonalize_flops
from axon.train.optimizers.schedule import AnySchedule
from axon.train.optimizers.sharing import map_matrices

TABLES = ("vocab", "positions")
"""A parameter with one of these axes is a table of independent vectors, not a matrix: AdamW updates it."""


@dataclass(frozen=True)
class Muon:
    """Steps along the momentum's orthogonal factor (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

    It updates matrices, inputs × outputs of their contraction by axes: parameters that decay and have both, but for
    those with `vocab` or `positions`. Each layer and each expert is a matrix of its own. `rest` updates all others, by
    its own schedule, decay and groups; its `clip` is that of all gradients.

    FLOPs for each m × n matrix (m ≤ n): `steps·(4 m²n + 2 m³)`, see `orthogonalize`, divided by the devices that split
    a matrix's state (tensor, and data from ZeRO-1 on): by all-to-alls, `2·P/devices` elements sent and received by each
    in the compute dtype, each gets whole matrices. Without ZeRO every data-parallel device does all of them.

    Args:
        schedule: the learning rate of the matrices. rest: updates all other parameters.
        momentum: its decay; nesterov: Nesterov's momentum. steps: of Newton–Schulz.
        scale: of an update. "fan": √max(1, outputs / inputs), as in the post; "rms": 0.2·√max(inputs, outputs), so
            that its elements are as large as AdamW's, and AdamW's rates and decay fit (Liu et al., arXiv:2502.16982).
        weight_decay: of the matrices. groups: matrices with a rate or decay of their own.
        separate: outputs of which each is a matrix of its own, as ("heads", "kv_heads").
        moments: how the momentum is kept, as of `AdamW.moments`, which is that of all others.
    """

    schedule: AnySchedule
    rest: AdamW
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    scale: Literal["fan", "rms"] = "fan"
    weight_decay: float = 0.1
    groups: tuple[Group, ...] = ()
    separate: tuple[str, ...] = ()
    moments: MomentFormat = "float32"

    by_layer: ClassVar[bool] = True

    def __post_init__(self):
        check_range(self, "[0, 1)", "momentum")
        check_range(self, "[0, inf)", "weight_decay")
        check_range(self, f"[1, {len(POLAR_EXPRESS)}]", "steps")

    @property
    def clip(self) -> float | None:
        """Of all gradients: that of `rest`."""
        return self.rest.clip

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        matrices = self._matrices(parameters)
        ours, others = _split(parameters, matrices)
        moments = Moments(self.moments, {"trace": True})
        updated = descend(self._direction(matrices), ours, self.schedule, self.weight_decay, self.groups, moments)
        return joined({"matrices": updated, "rest": self.rest.transform(others)})

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        ours, others = _split(parameters, self._matrices(parameters))
        return frozen_in(ours, self.groups) | self.rest.frozen(others)

    def update_flops(self, parameters: Parameters) -> dict[str, float]:
        """Path → FLOPs of orthogonalising a parameter's matrices."""
        matrices, frozen = self._matrices(parameters), self.frozen(parameters)
        return {
            path: one.number * orthogonalize_flops(one.length(one.rows), one.length(one.columns), self.steps)
            for path, one in matrices.items()
            if path not in frozen
        }

    def _matrices(self, parameters: Parameters) -> dict[str, Matrix]:
        """What Muon updates. Raises `UserError` for a name in `separate` that is no matrix's output."""
        forms = {path: as_matrix(spec) for path, spec in parameters.items() if not _is_table(spec)}
        outputs = {base(form.axes[d]) for form in forms.values() if form for d in form.outputs}
        if unknown := next((name for name in self.separate if name not in outputs), None):
            hint = suggest(unknown, outputs)
            raise UserError(f"Muon.separate: {unknown!r} is an output of none of this model's matrices.{hint}")
        separated = {path: as_matrix(parameters[path], self.separate) for path in forms}
        return {path: matrix for path, matrix in separated.items() if matrix}

    def _direction(self, matrices: Mapping[str, Matrix]) -> optax.GradientTransformation:
        def orthogonal(updates: Any, params: Any) -> dict[str, Array]:
            scope = axes.current()
            narrow = {path: x.astype(scope.compute) if scope else x for path, x in updates.items()}
            factors = map_matrices(partial(orthogonalize, steps=self.steps), matrices, narrow)
            return {path: self._scale(matrices[path]) * x.astype(updates[path].dtype) for path, x in factors.items()}

        momentum = optax.trace(self.momentum, self.nesterov)
        return optax.chain(momentum, optax.stateless(orthogonal))

    def _scale(self, matrix: Matrix) -> float:
        inputs, outputs = matrix.length(matrix.inputs), matrix.length(matrix.outputs)
        return 0.2 * max(inputs, outputs) ** 0.5 if self.scale == "rms" else max(1.0, outputs / inputs) ** 0.5


def _is_table(spec: ParamSpec) -> bool:
    return any(base(name) in TABLES for name in spec.own)


def _split(parameters: Parameters, chosen: Collection[str]) -> tuple[dict[str, ParamSpec], dict[str, ParamSpec]]:
    """The chosen parameters, and the others."""
    first = {path: spec for path, spec in parameters.items() if path in chosen}
    return first, {path: spec for path, spec in parameters.items() if path not in chosen}
