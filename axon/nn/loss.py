"""The training loss, over a vocabulary that may be split over devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Scope
from axon.axes.memory_order import row_major
from axon.axes.specs import mesh_axes_of, num_shards, partial_spec, without
from axon.kernels import cross_entropy as kernel
from axon.kernels.choice import choose
from axon.nn.head import Head


@jax.named_scope("loss")
def cross_entropy(x: Array, head: Head, targets: Array, weights: Array, z_loss: float = 0.0) -> tuple[Array, Array]:
    """`(Σ weight·(nll + z_loss·lse²), Σ weight·nll)` over all tokens of the global batch, in nats, float32.

    Args:
        x: `batch seq embed`; head: what makes logits of it.
        targets: `batch seq`, ids; weights: `batch seq`, 0 for padding.

    Only the first result is differentiated. Logits exist for one block of tokens at a time, each device's own tokens
    and its own columns of the vocabulary.
    """
    scope = axes.current()
    transposed = head.matrix.axes[0] == "vocab"
    if scope is None:
        value = head.matrix.get_value().T if transposed else head.matrix.get_value()
        flat = (x.reshape(-1, x.shape[-1]), value, targets.reshape(-1), weights.reshape(-1))
        return kernel.cross_entropy_reference(*flat, z_loss, head.vocab)
    choose("cross_entropy", {"xla": None}, "in blocks of tokens")
    split = _Split(scope, head, targets.size, z_loss)

    @jax.custom_vjp
    def apply(x, w):
        return split.sums(x, w, targets, weights)

    def forward(x, w):
        objective, nll, dx, dw = split.sums_and_gradients(x, w, targets, weights)
        with jax.named_scope("gradients"):  # made already here, in the forward: so `axon show` says
            dx = axes.reshard(dx, jax.typeof(x).sharding.spec) if axes.current_explicit() else dx
        dw = _row_major(axes.as_cotangent(dw, w))
        # Tied together, or the head's gradient waits unreduced, and whole, until the end of the backward.
        return (objective, nll), lax.optimization_barrier((dx.astype(x.dtype), dw))

    def backward(kept, cotangents):
        return tuple(axes.scaled(g, cotangents[0]) for g in kept)

    apply.defvjp(forward, backward)
    return apply(x, head.matrix.get_value())


class _Split:
    """The kernel, run by each device on its own tokens and its own columns of the vocabulary.

    A head that the layout stores apart, on mesh axes that split the tokens (ZeRO-3), is gathered there; but where the
    vocabulary has more columns than there are tokens on those mesh axes, they split the vocabulary, and the tokens
    are gathered.
    """

    def __init__(self, scope: Scope, head: Head, count: int, z_loss: float):
        matrix = head.matrix
        self.scope, self.transposed, self.z_loss, self.vocab = scope, matrix.axes[0] == "vocab", z_loss, head.vocab
        ids = scope.placement.spec(("batch", "seq"))
        apart = axes.zero3_mesh_axes(scope.placement, "embed", mesh_axes_of(ids))
        columns = matrix.get_value().shape[matrix.axes.index("vocab")]
        held = tuple(a for a in scope.placement.mesh_axes("vocab") if a not in mesh_axes_of(ids))
        together = count // num_shards(a for a in mesh_axes_of(ids) if a not in apart)
        if together >= columns or columns % num_shards((*held, *apart)):
            apart = ()
        self.ids = PartitionSpec(*(without(entry, apart) for entry in ids))
        self.tokens, self.columns = mesh_axes_of(self.ids), (*held, *apart)
        split = self.columns or None
        self.x = PartitionSpec(*self.ids, None)
        self.head = PartitionSpec(*(split if name == "vocab" else None for name in matrix.axes))

    def sums(self, x: Array, w: Array, targets: Array, weights: Array) -> Any:
        def local(x, w, targets, weights):
            flat = self._flat(x, w, targets, weights)
            sums = kernel.cross_entropy(*flat, z_loss=self.z_loss, vocab=self.vocab, axes=self.columns)
            return tuple(self._totals(sums))

        return self._run(local, (PartitionSpec(), PartitionSpec()), x, w, targets, weights)

    def sums_and_gradients(self, x: Array, w: Array, targets: Array, weights: Array) -> Any:
        def local(x, w, targets, weights):
            sums, dx, dw = kernel.cross_entropy_and_gradients(
                *self._flat(x, w, targets, weights),
                z_loss=self.z_loss,
                vocab=self.vocab,
                axes=self.columns,
                accumulate=self.scope.reduce,
            )
            return *self._totals(sums), dx.reshape(x.shape), dw.T if self.transposed else dw

        of_x = partial_spec(self.x, self.columns)
        outputs = (PartitionSpec(), PartitionSpec(), of_x, partial_spec(self.head, self.tokens))
        return self._run(local, outputs, x, w, targets, weights)

    def _run(self, local: Callable[..., Any], outputs: Any, x: Array, w: Array, targets: Array, weights: Array) -> Any:
        inputs = (self.x, self.head, self.ids, self.ids)
        values = (x.astype(self.scope.compute), w.astype(self.scope.compute), targets, weights)
        return axes.per_device(local, inputs, outputs)(
            *(axes.reshard(v, s) for v, s in zip(values, inputs, strict=True))
        )

    def _flat(self, x: Array, w: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array, Array]:
        """Tokens in one dimension, and the head as `embed vocab`."""
        return x.reshape(-1, x.shape[-1]), w.T if self.transposed else w, targets.reshape(-1), weights.reshape(-1)

    def _totals(self, sums: kernel.Sums) -> kernel.Sums:
        return kernel.Sums(*(lax.psum(v, self.tokens) if self.tokens else v for v in sums))


def _row_major(gradient: Array) -> Array:
    """The gradient in the memory order of its parameter. An all-to-all would leave it in another, and XLA would copy
    parameter and moments to follow it (0.37 GiB of Llama 3 8B on 16 v5e, libtpu 0.0.50.1)."""
    scope = axes.current()
    if scope is None or scope.placement.platform == "cpu":
        return gradient
    return row_major(gradient)
