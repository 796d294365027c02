"""Cross-entropy by each device on its own tokens, and on its own columns of a vocabulary that may be split."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Scope, StoredWeight
from axon.axes.specs import mesh_axes_of, num_shards, partial_spec, without
from axon.kernels import cross_entropy as kernel
from axon.kernels.cross_entropy import Columns
from axon.nn.head import Head


class SplitVocab:
    """The kernels of `axon.kernels.cross_entropy`, run by every device; arrays are `batch seq …`, and the head.

    A head that the layout stores apart, on mesh axes that split the tokens (ZeRO-3), is gathered there; but where the
    vocabulary has more columns than there are tokens on those mesh axes, they split the vocabulary, and the tokens
    are gathered.

    Args:
        shape: of the head's matrix. tokens: how many there are, on all devices.
    """

    def __init__(self, scope: Scope, head: Head, shape: tuple[int, ...], tokens: int):
        matrix, placement = head.matrix, scope.placement
        self.scope, self.transposed = scope, matrix.axes[0] == "vocab"
        self.by_token = placement.spec(("batch", "seq"))
        apart = axes.zero3_mesh_axes(placement, "embed", mesh_axes_of(self.by_token))
        columns = shape[matrix.axes.index("vocab")]
        own = tuple(a for a in placement.mesh_axes("vocab") if a not in mesh_axes_of(self.by_token))
        together = tokens // num_shards(a for a in mesh_axes_of(self.by_token) if a not in apart)
        if together >= columns or columns % num_shards((*own, *apart)):
            apart = ()
        self.columns = Columns(head.vocab, head.soft_cap, (*own, *apart))
        self.ids = PartitionSpec(*(without(entry, apart) for entry in self.by_token))
        self.x = PartitionSpec(*self.ids, None)
        self.head = self.head_spec(head)

    def head_spec(self, head: Head) -> PartitionSpec:
        """Where the matrix of a head lies whose vocabulary is split as this one's."""
        split = self.columns.mesh_axes or None
        return PartitionSpec(*(split if name == "vocab" else None for name in head.matrix.axes))

    def sums(self, x: Array, w: StoredWeight, targets: Array, weights: Array, z_loss: float) -> Any:
        """`kernel.Sums` over all tokens."""

        def local(x, w, *by_token):
            return self._totals(kernel.cross_entropy(*self._flat(x, w, *by_token), z_loss=z_loss, columns=self.columns))

        return self._run(local, (PartitionSpec(), PartitionSpec()), x, w, targets, weights)

    def sums_and_gradients(self, x: Array, w: StoredWeight, targets: Array, weights: Array, z_loss: float) -> Any:
        """`(objective, nll, dx, dw)`, the gradients as partial sums where other devices have a part; `dw` is None where
        the head is frozen, there and in `token_nll_gradients`."""
        trained = w.trained

        def local(x, w, *by_token):
            sums, dx, dw = kernel.cross_entropy_and_gradients(
                *self._flat(x, w, *by_token),
                z_loss=z_loss,
                columns=self.columns,
                accumulate=self.scope.reduce,
                trained=trained,
            )
            return *self._totals(sums), dx.reshape(x.shape), self.stored(dw)

        return self._run(local, (PartitionSpec(), PartitionSpec(), *self.gradients), x, w, targets, weights)

    def token_nll(self, x: Array, w: StoredWeight, targets: Array) -> tuple[Array, Array]:
        """`(nll, lse)` of each token."""

        def local(x, w, targets):
            found = kernel.token_nll(*self._flat(x, w, targets), columns=self.columns)
            return tuple(value.reshape(targets.shape) for value in found)

        nll, lse = self._run(local, (self.ids, self.ids), x, w, targets)
        return axes.reshard(nll, self.by_token), axes.reshard(lse, self.by_token)

    def token_nll_gradients(self, x: Array, w: StoredWeight, *by_token: Array) -> Any:
        """`(dx, dw)`, partial sums as of `sums_and_gradients`; `by_token` as of the kernel."""
        trained = w.trained

        def local(x, w, *by_token):
            dx, dw = kernel.token_nll_gradients(
                *self._flat(x, w, *by_token), columns=self.columns, accumulate=self.scope.reduce, trained=trained
            )
            return dx.reshape(x.shape), self.stored(dw)

        return self._run(local, self.gradients, x, w, *by_token)

    @property
    def gradients(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Where those for `x` and the head lie, partial sums."""
        return partial_spec(self.x, self.columns.mesh_axes), partial_spec(self.head, mesh_axes_of(self.ids))

    def _run(
        self, local: Callable[..., Any], outputs: Sequence[PartitionSpec], x: Array, w: StoredWeight, *by_token: Array
    ):
        inputs = (self.x, self.head, *(self.ids for _ in by_token))
        values = (x.astype(self.scope.compute), w.gathered(self.head), *by_token)
        placed = (axes.reshard(value, spec) for value, spec in zip(values, inputs, strict=True))
        return axes.per_device(local, inputs, tuple(outputs))(*placed)

    def _flat(self, x: Array, w: Array, *by_token: Array) -> tuple[Array, ...]:
        """Tokens in one dimension, and the head as `embed vocab`."""
        return x.reshape(-1, x.shape[-1]), w.T if self.transposed else w, *(value.reshape(-1) for value in by_token)

    def stored(self, dw: Array | None) -> Array | None:
        """`embed vocab` as the head is stored."""
        return dw.T if self.transposed and dw is not None else dw

    def _totals(self, sums: kernel.Sums) -> tuple[Array, ...]:
        tokens = mesh_axes_of(self.ids)
        return tuple(lax.psum(value, tokens) if tokens else value for value in sums)
