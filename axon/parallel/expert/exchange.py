"""Rows for experts, of tokens, and back: two linear maps, each the transpose of the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import like_operand, per_device, reshard
from axon.axes.specs import partial_spec
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.local import Local
from axon.parallel.expert.padded import Padded
from axon.parallel.expert.ragged import Ragged
from axon.parallel.expert.sent_rows import SentRows, rounded_tokens, sent_rows, used_rows
from axon.precision.formats import Format


@dataclass(frozen=True)
class Exchange:
    """Where the copies of tokens go in one round.

    Each map is computed by every device for its own tokens or rows, and differentiated as the other one, so that both
    only gather: no row is added up in an order that the load decides.

    Args:
        way: how rows are sent. shape: `batch seq k` of one device, k the copies of a token. plan: as `way.plan` makes
            it, of all devices.
    """

    mesh: ExpertMesh
    way: Local | Padded | Ragged
    shape: tuple[int, ...]
    plan: Any

    @classmethod
    def of_round(cls, mesh: ExpertMesh, way: Local | Padded | Ragged, chosen: Array, number: Array) -> "Exchange":
        """The exchange of a round, from `chosen[batch seq k]`, the expert of each copy of a token or -1."""

        def local(chosen: Array, number: Array) -> Any:
            return way.plan(chosen.reshape(-1), number)

        specs = way.Plan(*(mesh.rows for _ in way.Plan._fields))
        plan = per_device(local, (mesh.x, PartitionSpec()), specs)(reshard(chosen, mesh.x), number)
        return cls(mesh, way, mesh.of_device(chosen.shape), plan)

    def dispatch(self, x: Array, weights: Array, form: Format | None) -> tuple[Array | SentRows, Array]:
        """`x[batch seq embed]` and `weights[batch seq k]` → `copies rows embed`, and the weight of each row.

        `form`: the format in which they are sent; None: as they are.
        """
        types = jax.typeof(x), jax.typeof(weights)

        @jax.custom_vjp
        def dispatch(x: Array, weights: Array, plan: Any) -> tuple[Array | SentRows, Array]:
            rows = self._dispatched(x, plan) if form is None else self._rounded(x, form, plan)
            return rows, self._sent(weights, plan)

        def backward(plan: Any, cotangents: Any) -> Any:
            drows, dweights = cotangents
            dx = self._combined(drows if form is None else drows.place, plan)
            return like_operand(dx, types[0]), like_operand(self._returned(dweights, plan), types[1]), None

        dispatch.defvjp(lambda x, weights, plan: (dispatch(x, weights, plan), plan), backward)
        return dispatch(x, weights, self.plan)

    def sent(self, values: Array) -> Array:
        """What has a width of its own for each token, `batch seq …`, for each of its copies; not differentiable."""
        return self._dispatched(values, self.plan)

    def combine(self, rows: Array, out: PartitionSpec) -> Array:
        """`copies rows embed` → `batch seq embed` under `out`: the sum of each token's copies."""
        kind = jax.typeof(rows)

        @jax.custom_vjp
        def combine(rows: Array, plan: Any) -> Array:
            return reshard(self._combined(rows, plan), out)

        def backward(plan: Any, dy: Array) -> Any:
            return like_operand(self._dispatched(dy, plan), kind), None

        combine.defvjp(lambda rows, plan: (combine(rows, plan), plan), backward)
        return combine(rows, self.plan)

    def _dispatched(self, x: Array, plan: Any) -> Array:
        def local(x: Array, plan: Any) -> Array:
            return self.way.send(x.reshape(-1, x.shape[-1]), plan)[None]

        return self._run(local, (reshard(x, self.mesh.x), plan), self.mesh.x, self.mesh.wide)

    def _rounded(self, x: Array, form: Format, plan: Any) -> SentRows:
        def local(part: Array, plan: Any) -> Array:
            return used_rows(self.way.send(part, plan), plan.sizes)[None]

        tokens, spec = rounded_tokens(self.mesh, x, form)
        return sent_rows(self.mesh, *(self._run(local, (part, plan), spec, self.mesh.wide) for part in tokens))

    def _combined(self, rows: Array, plan: Any) -> Array:
        """Sums of copies, of which the devices along `mlp` and `shared` have parts."""

        def local(rows: Array, plan: Any) -> Array:
            total = self.way.back(rows[0], plan).summed(self.shape[-1])
            return total.reshape(*self.shape[:2], -1)

        out = partial_spec(self.mesh.x, (*self.mesh.mlp, *self.mesh.shared))
        return self._run(local, (reshard(rows, self.mesh.wide), plan), self.mesh.wide, out)

    def _sent(self, weights: Array, plan: Any) -> Array:
        def local(weights: Array, plan: Any) -> Array:
            return self.way.send(weights.reshape(-1), plan)

        return self._run(local, (reshard(weights, self.mesh.x), plan), self.mesh.x, self.mesh.rows)

    def _returned(self, weights: Array, plan: Any) -> Array:
        def local(weights: Array, plan: Any) -> Array:
            return self.way.back(weights, plan).each().reshape(self.shape)

        out = partial_spec(self.mesh.x, self.mesh.shared)
        return self._run(local, (reshard(weights, self.mesh.rows), plan), self.mesh.rows, out)

    def _run(self, local: Callable[..., Array], values: Any, spec: PartitionSpec, out: PartitionSpec) -> Array:
        plan = jax.tree.map(lambda _: self.mesh.rows, values[1])
        return per_device(local, (spec, plan), out)(*values)
