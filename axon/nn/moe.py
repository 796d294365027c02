"""Mixture of experts: a router, and gated MLPs of which each token goes through a few."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon import axes
from axon.axes import Scope, add, einsum, shard, stored_array
from axon.errors import UserError
from axon.nn.activations import Activation, swiglu
from axon.nn.auxiliary import Auxiliary
from axon.nn.inputs import Inputs
from axon.nn.mlp import GatedMLP
from axon.nn.param import Dims, Param, constant, fan_in
from axon.nn.router import Routed, Router, Routing
from axon.nn.weight_transform import Operand, Weight
from axon.parallel.expert import (
    ExpertMesh,
    Local,
    Matrix,
    Padded,
    Products,
    Ragged,
    SentRows,
    sent_format,
    through_experts,
)

TOKENS = "batch.expert seq.expert"
RESIDUAL = "batch seq.residual embed"

DISPATCHERS = {"local": Local, "padded": Padded, "ragged": Ragged}


class MoE(nnx.Module):
    """Each token through `top_k` of many gated MLPs, weighted by its router, and through a shared one if there is one.

    Args:
        dims: sizes of embed, experts and of each expert's mlp.
        routing: how experts are chosen. shared: width of an MLP that all tokens go through (DeepSeekMoE, Dai et al.,
            arXiv:2401.06066), 0 for none. gated_shared: whether what it gives is multiplied by the sigmoid of a
            projection of the token (Qwen3-Next).
        activation, out_scale: as of `GatedMLP`. bias: whether the router and the experts' products have biases.
    """

    remat_names = ("dispatched", "expert_gate", "expert_up", *GatedMLP.remat_names)
    """The activations that a remat policy can keep by name."""

    def __init__(
        self,
        dims: Dims,
        routing: Routing,
        *,
        shared: int = 0,
        gated_shared: bool = False,
        activation: Activation = swiglu,
        bias: bool = False,
        out_scale: float = 1.0,
    ):
        self.routing, self.activation = routing, activation
        self.has_shared, self.gated_shared, self.has_bias = shared > 0, gated_shared, bias
        self.router = Router(dims, routing, bias=bias)
        up, down = "experts embed.expert mlp.expert", "experts mlp.expert embed.expert"
        self.gate: Weight = Param(up, dims, fan_in("embed.expert"), in_stack=True)
        self.up: Weight = Param(up, dims, fan_in("embed.expert"), in_stack=True)
        self.down: Weight = Param(down, dims, fan_in("mlp.expert", out_scale), in_stack=True)
        if bias:
            self.gate_bias, self.up_bias, self.down_bias = (
                Param(f"experts {width}", dims, constant(0.0), decay=False)
                for width in ("mlp.expert", "mlp.expert", "embed.expert")
            )
        if shared:
            if gated_shared:
                self.shared_gate = Param("embed", dims, fan_in("embed"))
            self.shared = GatedMLP({**dims, "mlp": shared}, activation=activation, out_scale=out_scale)

    @jax.named_scope("moe")
    def __call__(self, x: Array, inputs: Inputs) -> tuple[Array, Auxiliary]:
        """Of `x[batch seq.residual embed]` the same, and the router's losses and statistics."""
        documents = inputs.documents
        is_real = jnp.ones(x.shape[:2], bool) if documents is None else documents >= 0
        routed, auxiliary = self.router(x, is_real)
        y = self._experts(x, routed)
        return y + self._shared(x) if self.has_shared else y, auxiliary.within("router")

    @property
    def chosen_experts(self) -> tuple[int, int]:
        """How many experts multiply a token, and how many there are, see `axon.nn.flops`."""
        return self.routing.top_k, self.routing.experts

    def _shared(self, x: Array) -> Array:
        y = self.shared(x)
        if not self.gated_shared:
            return y
        gate = einsum("batch seq.residual embed, embed -> batch seq.residual", x, self.shared_gate)
        return y * jax.nn.sigmoid(gate.astype(jnp.float32))[..., None].astype(y.dtype)

    @jax.named_scope("experts")
    def _experts(self, x: Array, routed: Routed) -> Array:
        scope = axes.current()
        if scope is None or scope.execution.dispatcher == "dense":
            return self._dense(x, routed)
        mesh = ExpertMesh.of(scope, self.routing.experts)
        dispatcher = DISPATCHERS[_dispatcher(scope, mesh)](mesh, _copies(mesh, routed), scope.execution.capacity_factor)
        gate, up, down = self._matrices()
        arrays, tree = jax.tree.flatten(
            (gate, up, down), is_leaf=lambda leaf: isinstance(leaf, axes.Stored | axes.Report)
        )
        out = scope.placement.spec(("batch", "seq.residual", "embed"))
        form = sent_format(gate, up)
        own = _own_ranks(scope, x, max(len(matrix.low) for matrix in (gate, up, down)))
        return through_experts(mesh, dispatcher, partial(self._on_rows, tree), arrays, x, *routed, out, form, own)

    def _matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """The matrices of gate, up and down, as they are stored."""
        biases = (self.gate_bias, self.up_bias, self.down_bias) if self.has_bias else (None, None, None)
        gate, up, down = map(_matrix, (self.gate, self.up, self.down), biases)
        return gate, up, down

    def _on_rows(
        self,
        tree: Any,
        products: Products,
        arrays: Sequence[axes.Stored | axes.Report],
        rows: Array | SentRows,
        weights: Array,
    ) -> Array:
        """Each row through its expert. Weighted before the last product, so that what comes back is only added up."""
        gate, up, down = jax.tree.unflatten(tree, arrays)
        rows = checkpoint_name(rows, "dispatched")
        gated = checkpoint_name(products.up(rows, gate), "expert_gate")
        lifted = checkpoint_name(products.up(rows, up), "expert_up")
        return products.down(_weighted(self.activation(gated, lifted), weights), down, weights)

    def _dense(self, x: Array, routed: Routed) -> Array:
        """Every expert on every token, weighted by 0 where it was not chosen."""
        hidden = f"{TOKENS} experts mlp.expert"
        numbers = jnp.arange(self.routing.experts)
        own = routed.chosen[..., None] == numbers  # batch seq k experts
        weights = shard(jnp.sum(jnp.where(own, routed.weights[..., None], 0), axis=2), f"{TOKENS} experts")
        up = f"{TOKENS} embed.expert, experts embed.expert mlp.expert -> {hidden}"
        down = f"{hidden}, experts mlp.expert embed.expert -> {TOKENS} embed.expert"
        tokens = shard(x, f"{TOKENS} embed.expert")
        gate, lifted = einsum(up, tokens, self.gate), einsum(up, tokens, self.up)
        if self.has_bias:
            plus = f"{hidden}, experts mlp.expert -> {hidden}"
            gate, lifted = add(plus, gate, self.gate_bias), add(plus, lifted, self.up_bias)
        y = einsum(down, _weighted(self.activation(gate, lifted), weights), self.down)
        if self.has_bias:
            y += einsum(f"{TOKENS} experts, experts embed.expert -> {TOKENS} embed.expert", weights, self.down_bias)
        return shard(y, RESIDUAL)


def _dispatcher(scope: Scope, mesh: ExpertMesh) -> str:
    """The name of one of `DISPATCHERS`, with a word in the log."""
    if not mesh.exchanged:
        split = f", summed over {' and '.join(mesh.shared)}" if mesh.shared else ""
        axes.log_choice("experts", f"each device's own tokens{split}")
        return "local"
    execution, platform = scope.execution, scope.placement.platform
    over = " and ".join(mesh.exchanged)
    where = f"tokens sent over {over}, {execution.capacity_factor} × the balanced load in a round"
    if execution.dispatcher == "ragged" and platform == "cpu":
        raise UserError("Execution.dispatcher = 'ragged' is unavailable on CPUs, use 'padded'")
    by_platform = "padded" if platform == "cpu" else "ragged"
    name = by_platform if execution.dispatcher == "auto" else execution.dispatcher
    axes.log_choice("experts", f"{name}: {where}")
    return name


def _copies(mesh: ExpertMesh, routed: Routed) -> int:
    """How many copies a device has of its tokens."""
    batch, seq, k = mesh.of_device(routed.chosen.shape)
    return batch * seq * k


def _matrix(weight: Weight, bias: Param | None) -> Matrix:
    """A matrix as it is stored, with its bias."""
    of_bias = None if bias is None else stored_array(bias, "MoE")
    if isinstance(weight, Operand):
        return weight.grouped(of_bias)
    return Matrix(stored_array(weight, "MoE"), bias=of_bias)


def _own_ranks(scope: Scope, x: Array, adapters: int) -> Array | None:
    """Of each token of `x[batch seq embed]` which of the ranks are its own: those of the adapter that it is served
    with, or a number for each of the `adapters` that are trained at once; None: all."""
    if scope.own_ranks is not None or scope.sequence_adapters is None or not adapters:
        return scope.own_ranks
    own = scope.sequence_adapters[:, None, None] == jnp.arange(adapters)
    return jnp.broadcast_to(own, (*x.shape[:2], adapters))


def _weighted(h: Array, weights: Array) -> Array:
    return (h * weights[..., None]).astype(h.dtype)
