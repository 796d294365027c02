"""Divergence of a head's distributions from those of a teacher, token by token."""

from typing import Any, Protocol

import jax
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import StoredWeight
from axon.kernels import cross_entropy as kernel
from axon.kernels.cross_entropy import Columns, Divergence, Found, HeadTeacher, Side, Teacher, TopTeacher
from axon.nn.head import Head
from axon.nn.loss import head_cotangent
from axon.nn.split_vocab import SplitVocab


def token_divergence(x: Array, head: Head, teacher_x: Array, teacher: Head, kind: Divergence) -> Array:
    """The divergence of each token in nats, `batch seq` float32, see `axon.kernels.cross_entropy.divergence`.

    Args:
        x: `batch seq embed`; head: what makes logits of it. teacher_x, teacher: the same of the teacher, whose `embed`
            may be another; its head has as many columns.

    Differentiable for `x` and the head alone: the teacher is a constant.
    """
    return _divergence(x, head, _OfHead(teacher), (teacher_x, teacher.array("token_divergence")), kind)


def top_divergence(x: Array, head: Head, ids: Array, logprobs: Array, kind: Divergence) -> Array:
    """As `token_divergence`, of a teacher whose most likely ids alone are known, see
    `axon.kernels.cross_entropy.TopTeacher`: `ids` and `logprobs` are `batch seq top`."""
    return _divergence(x, head, _OfTop(), (ids, logprobs), kind)


class _Source(Protocol):
    """What makes a `Teacher` of its operands, arrays over all devices."""

    def specs(self, split: SplitVocab) -> tuple[PartitionSpec, ...]:
        """Where the operands lie when each device has its part of them."""
        ...

    def gathered(self, split: SplitVocab, operands: tuple[Array, ...]) -> tuple[Array, ...]:
        """The operands in the dtype of the computation."""
        ...

    def teacher(self, operands: tuple[Array, ...], columns: Columns) -> Teacher:
        """The teacher of a device's part of them; `columns`: of the student."""
        ...


class _OfHead:
    def __init__(self, head: Head):
        self.head = head

    def specs(self, split: SplitVocab) -> tuple[PartitionSpec, ...]:
        return split.x, split.head_spec(self.head)

    def gathered(self, split: SplitVocab, operands: tuple[Array, ...]) -> tuple[Array, ...]:
        x, matrix = operands
        return x.astype(split.scope.compute), StoredWeight(split.scope, matrix).gathered(split.head_spec(self.head))

    def teacher(self, operands: tuple[Array, ...], columns: Columns) -> Teacher:
        x, matrix = operands
        return HeadTeacher(_side(x, matrix, self.head, columns.mesh_axes))


class _OfTop:
    def specs(self, split: SplitVocab) -> tuple[PartitionSpec, ...]:
        return (PartitionSpec(*split.ids, None),) * 2

    def gathered(self, split: SplitVocab, operands: tuple[Array, ...]) -> tuple[Array, ...]:
        return operands

    def teacher(self, operands: tuple[Array, ...], columns: Columns) -> Teacher:
        ids, logprobs = (one.reshape(-1, one.shape[-1]) for one in operands)
        return TopTeacher(ids, logprobs, columns)


@jax.named_scope("loss")
def _divergence(x: Array, head: Head, source: _Source, operands: tuple[Array, ...], kind: Divergence) -> Array:
    matrix, scope = head.array("token_divergence"), axes.current()
    if scope is None:
        student = _side(x, matrix, head, ())
        teacher = source.teacher(jax.lax.stop_gradient(operands), student.columns)
        return kernel.token_divergence_reference(student, teacher, kind).reshape(x.shape[:2])
    split = SplitVocab(scope, head, matrix.shape, x.shape[0] * x.shape[1])
    return axes.use_weight(scope, _TokenDivergence(split, head, source, kind), matrix, x, *operands)


def _side(x: Array, matrix: Array, head: Head, mesh_axes: Any) -> Side:
    flat = matrix.T if head.matrix.axes[0] == "vocab" else matrix
    return Side(x.reshape(-1, x.shape[-1]), flat, Columns(head.vocab, head.soft_cap, mesh_axes))


class _TokenDivergence(axes.Operation):
    """A teacher's head is split as the student's: its split is decided once, and the teacher's follows."""

    def __init__(self, split: SplitVocab, head: Head, source: _Source, kind: Divergence):
        self.split, self.head, self.source, self.kind = split, head, source, kind

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Any, Any]:
        x, *taught = operands

        def local(x, w, *taught):
            found = kernel.token_divergence(*self._sides(x, w, taught), self.kind)
            return tuple(value.reshape(x.shape[:2]) for value in found)

        found = self._run(local, (self.split.ids,) * len(Found._fields), weight, x, tuple(taught))
        return axes.reshard(found[0], self.split.by_token), (*found, *operands)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Any) -> Any:
        count = len(Found._fields)
        found, x, taught, trained = saved[:count], saved[count], saved[count + 1 :], weight.trained

        def local(x, w, *values):
            taught_here, by_token = values[: len(taught)], (value.reshape(-1) for value in values[len(taught) :])
            *found, cotangent = by_token
            dx, dw = kernel.token_divergence_gradients(
                *self._sides(x, w, taught_here), self.kind, Found(*found), cotangent, self.split.scope.reduce, trained
            )
            return dx.reshape(x.shape), self.split.stored(dw)

        dx, dw = self._run(local, self.split.gradients, weight, x, taught, *found, cotangent)
        return head_cotangent(weight, dw), dx, *(None for _ in taught)

    def _sides(self, x: Array, w: Array, taught: tuple[Array, ...]) -> tuple[Side, Teacher]:
        student = _side(x, w, self.head, self.split.columns.mesh_axes)
        return student, self.source.teacher(taught, student.columns)

    def _run(self, local: Any, outputs: Any, weight: StoredWeight, x: Array, taught: Any, *by_token: Array) -> Any:
        split = self.split
        inputs: tuple[PartitionSpec, ...] = (
            split.x, split.head, *self.source.specs(split), *(split.ids for _ in by_token)
        )  # fmt: skip
        values = (
            x.astype(split.scope.compute), weight.gathered(split.head), *self.source.gathered(split, taught), *by_token
        )  # fmt: skip
        placed = (axes.reshard(value, spec) for value, spec in zip(values, inputs, strict=True))
        return axes.per_device(local, inputs, tuple(outputs))(*placed)
