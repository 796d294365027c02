"""The training loss, over a vocabulary that may be split over devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Scope
from axon.kernels import cross_entropy as kernel
from axon.nn.param import Param


@jax.named_scope("loss")
def cross_entropy(
    x: Array, head: Param, targets: Array, weights: Array, z_loss: float = 0.0, vocab: int | None = None
) -> tuple[Array, Array]:
    """`(Σ weight·(nll + z_loss·lse²), Σ weight·nll)` over all tokens of the global batch, in nats, float32.

    Args:
        x: `batch seq embed`; head: `embed vocab`, or `vocab embed` (a tied table).
        targets: `batch seq`, ids; weights: `batch seq`, 0 for padding.
        vocab: how many of the head's columns stand for ids, where it is padded; None for all.

    Only the first result is differentiated. Logits exist for one block of tokens at a time, each device's own tokens
    and its own columns of the vocabulary.
    """
    scope = axes.current()
    turned = head.axes[0] == "vocab"
    if scope is None:
        value = head.get_value().T if turned else head.get_value()
        flat = (x.reshape(-1, x.shape[-1]), value, targets.reshape(-1), weights.reshape(-1))
        return kernel.cross_entropy_reference(*flat, z_loss, vocab)
    split = _Split(scope, turned, z_loss, vocab)

    @jax.custom_vjp
    def apply(x, w):
        return split.sums(x, w, targets, weights)

    def forward(x, w):
        objective, nll, dx, dw = split.sums_and_gradients(x, w, targets, weights)
        dx = axes.move(dx, jax.typeof(x).sharding.spec) if axes.current_explicit() else dx
        # Tied together, or the head's gradient waits unreduced, and whole, until the end of the backward.
        return (objective, nll), lax.optimization_barrier((dx.astype(x.dtype), axes.as_cotangent(dw, w)))

    def backward(kept, cotangents):
        return tuple(axes.scaled(g, cotangents[0]) for g in kept)

    apply.defvjp(forward, backward)
    return apply(x, head.get_value())


class _Split:
    """The kernel, run by each device on its own tokens and its own columns of the vocabulary."""

    def __init__(self, scope: Scope, turned: bool, z_loss: float, vocab: int | None):
        self.scope, self.turned, self.z_loss, self.vocab = scope, turned, z_loss, vocab
        self.ids = scope.placement.spec(("batch", "seq"))
        self.tokens = tuple(a for entry in self.ids for a in axes.entries(entry))
        self.columns = tuple(a for a in scope.placement.mesh_axes("vocab") if a not in self.tokens)
        held = self.columns or None
        self.x, self.head = PartitionSpec(*self.ids, None), PartitionSpec(*((held, None) if turned else (None, held)))

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
            return *self._totals(sums), dx.reshape(x.shape), dw.T if self.turned else dw

        of_x = axes.partial_spec(self.x, self.columns)
        outputs = (PartitionSpec(), PartitionSpec(), of_x, axes.partial_spec(self.head, self.tokens))
        return self._run(local, outputs, x, w, targets, weights)

    def _run(self, local: Callable[..., Any], outputs: Any, x: Array, w: Array, targets: Array, weights: Array) -> Any:
        inputs = (self.x, self.head, self.ids, self.ids)
        values = (x.astype(self.scope.compute), w.astype(self.scope.compute), targets, weights)
        return axes.per_device(local, inputs, outputs)(*(axes.move(v, s) for v, s in zip(values, inputs, strict=True)))

    def _flat(self, x: Array, w: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array, Array]:
        """Tokens in one dimension, and the head as `embed vocab`."""
        return x.reshape(-1, x.shape[-1]), w.T if self.turned else w, targets.reshape(-1), weights.reshape(-1)

    def _totals(self, sums: kernel.Sums) -> kernel.Sums:
        return kernel.Sums(*(lax.psum(v, self.tokens) if self.tokens else v for v in sums))
