"""Divergence of a head's distributions from those of a teacher's head, token by token."""

from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import StoredWeight
from axon.kernels import cross_entropy as kernel
from axon.kernels.cross_entropy import Columns, Divergence, Found, Side
from axon.nn.head import Head
from axon.nn.loss import head_cotangent
from axon.nn.split_vocab import SplitVocab


@jax.named_scope("loss")
def token_divergence(x: Array, head: Head, teacher_x: Array, teacher: Head, kind: Divergence) -> Array:
    """The divergence of each token in nats, `batch seq` float32, see `axon.kernels.cross_entropy.divergence`.

    Args:
        x: `batch seq embed`; head: what makes logits of it. teacher_x, teacher: the same of the teacher, whose `embed`
            may be another; its head has as many columns.

    Differentiable for `x` and the head alone: the teacher is a constant.
    """
    matrix, fixed, scope = head.array("token_divergence"), teacher.array("token_divergence"), axes.current()
    if scope is None:
        constant = _side(*jax.lax.stop_gradient((teacher_x, fixed)), teacher, ())
        return kernel.token_divergence_reference(_side(x, matrix, head, ()), constant, kind).reshape(x.shape[:2])
    split = SplitVocab(scope, head, matrix.shape, x.shape[0] * x.shape[1])
    return axes.use_weight(scope, _TokenDivergence(split, head, teacher, kind), matrix, x, teacher_x, fixed)


def _side(x: Array, matrix: Array, head: Head, mesh_axes: Any) -> Side:
    flat = matrix.T if head.matrix.axes[0] == "vocab" else matrix
    return Side(x.reshape(-1, x.shape[-1]), flat, Columns(head.vocab, head.soft_cap, mesh_axes))


class _TokenDivergence(axes.Operation):
    """Both heads are split as the student's: its split is decided once, and the teacher's follows."""

    def __init__(self, split: SplitVocab, head: Head, teacher: Head, kind: Divergence):
        self.split, self.head, self.teacher, self.kind = split, head, teacher, kind

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Any, Any]:
        def local(x, w, teacher_x, teacher_w):
            found = kernel.token_divergence(*self._sides(x, w, teacher_x, teacher_w), self.kind)
            return tuple(value.reshape(x.shape[:2]) for value in found)

        ids = self.split.ids
        found = self._run(local, (ids,) * len(Found._fields), weight, operands)
        return axes.reshard(found[0], self.split.by_token), (*operands, *found)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Any) -> Any:
        def local(x, w, teacher_x, teacher_w, *by_token):
            *found, cotangent = (value.reshape(-1) for value in by_token)
            sides = self._sides(x, w, teacher_x, teacher_w)
            dx, dw = kernel.token_divergence_gradients(
                *sides, self.kind, Found(*found), cotangent, self.split.scope.reduce
            )
            return dx.reshape(x.shape), self.split.stored(dw)

        dx, dw = self._run(local, self.split.gradients, weight, saved[:3], *saved[3:], cotangent)
        return head_cotangent(weight, dw), dx, None, None

    def _sides(self, x: Array, w: Array, teacher_x: Array, teacher_w: Array) -> tuple[Side, Side]:
        mesh_axes = self.split.columns.mesh_axes
        return _side(x, w, self.head, mesh_axes), _side(teacher_x, teacher_w, self.teacher, mesh_axes)

    def _run(self, local: Any, outputs: Any, weight: StoredWeight, operands: Any, *by_token: Array) -> Any:
        split, (x, teacher_x, teacher) = self.split, operands
        own, theirs = split.head, split.head_spec(self.teacher)
        compute = split.scope.compute
        fixed = StoredWeight(split.scope, teacher).gathered(theirs)
        inputs: tuple[PartitionSpec, ...] = (split.x, own, split.x, theirs, *(split.ids for _ in by_token))
        values = (x.astype(compute), weight.gathered(own), teacher_x.astype(compute), fixed, *by_token)
        placed = (axes.reshard(value, spec) for value, spec in zip(values, inputs, strict=True))
        return axes.per_device(local, inputs, tuple(outputs))(*placed)
