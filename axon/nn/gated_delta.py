"""Gated DeltaNet: linear attention whose state forgets and corrects itself (Yang et al., arXiv:2412.06464)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import add, einsum
from axon.kernels.gated_delta import delta_step, gated_delta, gated_delta_run
from axon.nn.cache import CacheSpec
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.norm import RMSNorm
from axon.nn.param import Dims, Param, constant, fan_in
from axon.parallel.context import Runs

KEY, VALUE = "delta_heads key_dim", "delta_heads per_head value_dim"
STATE = "delta_heads per_head key_dim value_dim"
EPS = 1e-6
"""Added to the sum of squares of a query or a key (fla's, which Qwen3-Next was trained with)."""

Cache = dict[str, Array]


class GatedDeltaNet(nnx.Module):
    """Queries, keys and values, each a short convolution over the document, through the gated delta rule of each head;
    the outputs are normed and gated.

    Args:
        dims: sizes of embed, delta_heads (of queries and keys), per_head (values for each of them), key_dim, value_dim,
            and conv_taps (tokens that the convolution sees). eps: of the norm. out_scale: of the output's initial
            values.
    """

    remat_names = ("delta_query", "delta_key", "delta_value", "delta")
    """The activations that a remat policy can keep by name."""

    def __init__(self, dims: Dims, eps: float = 1e-6, *, out_scale: float = 1.0):
        self.sizes = {name: dims[name] for name in ("delta_heads", "per_head", "key_dim", "value_dim")}
        self.taps = dims["conv_taps"]
        self.query, self.key = Param(f"embed {KEY}", dims), Param(f"embed {KEY}", dims)
        self.value, self.gate = Param(f"embed {VALUE}", dims), Param(f"embed {VALUE}", dims)
        self.beta, self.decay = (Param("embed delta_heads per_head", dims) for _ in range(2))
        taps = {"init": fan_in("conv_taps"), "decay": False}
        self.query_taps, self.key_taps = (Param(f"{KEY} conv_taps", dims, **taps) for _ in range(2))
        self.value_taps = Param(f"{VALUE} conv_taps", dims, **taps)
        self.rate = Param("delta_heads per_head", dims, _log_uniform, decay=False)
        self.step = Param("delta_heads per_head", dims, constant(1.0), decay=False)
        self.norm = RMSNorm("value_dim", dims, eps)
        self.out = Param(f"{VALUE} embed", dims, fan_in(VALUE, out_scale))

    @jax.named_scope("gated_delta")
    def __call__(self, x: Array, inputs: Inputs, cache: Cache | None = None) -> tuple[Array, Cache | None]:
        """`x[batch seq embed]` → `batch seq.residual embed`, and the cache after the tokens of `x`."""
        projected = {
            "query": einsum(f"batch seq embed, embed {KEY} -> batch seq {KEY}", x, self.query),
            "key": einsum(f"batch seq embed, embed {KEY} -> batch seq {KEY}", x, self.key),
            "value": einsum(f"batch seq embed, embed {VALUE} -> batch seq {VALUE}", x, self.value),
        }
        taps = {"query": self.query_taps, "key": self.key_taps, "value": self.value_taps}
        windows, cache = self._windows(projected, inputs, cache)
        q, k, v = (
            checkpoint_name(jax.nn.silu(_mixed(windows[name], taps[name])), f"delta_{name}") for name in projected
        )
        q, k = (_unit(one.astype(jnp.float32)) for one in (q, k))
        operands = (q * self.sizes["key_dim"] ** -0.5, k, v.astype(jnp.float32), *self._gates(x))
        if cache is None:
            out = _over_documents(operands, inputs)
        else:
            state, out = inputs.rows.scan(_step, cache["state"], operands)
            cache = cache | {"state": state}
        gate = einsum(f"batch seq embed, embed {VALUE} -> batch seq {VALUE}", x, self.gate)
        out = checkpoint_name(self.norm(out.astype(x.dtype), f"batch seq {VALUE}"), "delta")
        out = out * jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype)
        return einsum(f"batch seq {VALUE}, {VALUE} embed -> batch seq.residual embed", out, self.out), cache

    def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
        """The state of each head, and the last tokens that the convolutions see, of a sequence of any length."""
        scope = axes.current()
        dtype = jnp.float32 if scope is None else scope.compute

        def spec(names: str, dtype: Any, *before: int) -> CacheSpec:
            shape = (batch, *before, *(self.sizes[name] for name in names.split()))
            own = ("batch", *["conv_taps"] * len(before), *names.split())
            return CacheSpec(own, shape, dtype, cache_kind="state")

        last = {"query": KEY, "key": KEY, "value": VALUE}
        found = {name: spec(names, dtype, self.taps - 1) for name, names in last.items()}
        return found | {"state": spec(STATE, jnp.float32)}

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token: its projections, its convolutions, and the rule's three products with a state."""
        heads, per_head, key, value = self.sizes.values()
        channels = heads * (2 * key + per_head * value)
        return matmul_flops(self) + 2 * self.taps * channels + 6 * heads * per_head * key * value

    def _gates(self, x: Array) -> tuple[Array, Array]:
        """log_decay and beta, `batch seq delta_heads per_head`, float32."""
        names = "batch seq delta_heads per_head"
        beta, step = (einsum(f"batch seq embed, embed delta_heads per_head -> {names}", x, one).astype(jnp.float32)
                      for one in (self.beta, self.decay))  # fmt: skip
        with axes.exact():
            step = jax.nn.softplus(add(f"{names}, delta_heads per_head -> {names}", step, self.step))
            rate = add(f"{names}, delta_heads per_head -> {names}", jnp.zeros_like(step), self.rate)
        return -jnp.exp(rate) * step, jax.nn.sigmoid(beta)

    def _windows(
        self, projected: dict[str, Array], inputs: Inputs, cache: Cache | None
    ) -> tuple[dict[str, Array], Cache | None]:
        """Each token's channels with those of the tokens before it, `batch seq conv_taps …`."""
        if cache is not None:
            found = {name: inputs.rows.windows(x, cache[name]) for name, x in projected.items()}
            return {n: window for n, (window, _) in found.items()}, cache | {n: last for n, (_, last) in found.items()}
        look_back = partial(_window, self.taps)
        names = ("batch", "seq", "conv_taps", "delta_heads")
        return {name: _by_runs(look_back, (x, inputs.positions), names) for name, x in projected.items()}, None


def _step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    return delta_step(state, *token)


def _mixed(window: Array, taps: Param) -> Array:
    names = " ".join(taps.axes[:-1])
    return einsum(f"batch seq conv_taps {names}, {names} conv_taps -> batch seq {names}", window, taps)


def _window(taps: int, runs: Runs, x: Array, positions: Array) -> Array:
    """`runs_batch length conv_taps …`: each token and those before it, 0 beyond its document."""
    length, others = x.shape[1], taps - 1
    shorter = range(-(-others // length), 0, -1)  # how far back are the runs that have them
    parts = [*(runs.before(x[:, max(0, length - others) :], by) for by in shorter), x]
    padded = jnp.concatenate(parts, axis=1)[:, -(others + length) :]

    def before(n: int) -> Array:
        tokens = lax.slice_in_dim(padded, others - n, others - n + length, axis=1)
        return jnp.where(positions.reshape(*positions.shape, *[1] * (x.ndim - 2)) >= n, tokens, 0)

    return jnp.stack([before(n) for n in reversed(range(taps))], axis=2)


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def _over_documents(operands: tuple[Array, ...], inputs: Inputs) -> Array:
    """The outputs of the gated delta rule over the documents of each sequence."""
    documents = jnp.zeros(inputs.tokens.shape, jnp.int32) if inputs.documents is None else inputs.documents
    return _by_runs(_rule, (*operands, documents), ("batch", "seq", "delta_heads"))


@jax.default_matmul_precision("highest")
def _rule(runs: Runs, q: Array, k: Array, v: Array, log_decay: Array, beta: Array, documents: Array) -> Array:
    """`runs_batch length delta_heads per_head value_dim`: the rule over all runs, the state passed on between them."""
    if runs.count == 1:
        return gated_delta(q, k, v, log_decay, beta, documents)
    last = runs.before(documents[:, -1])
    out, read, transition, added = gated_delta_run(q, k, v, log_decay, beta, documents, last)
    return out + jnp.einsum("bihrk,bhrkv->bihrv", read, runs.states(transition, added))


def _by_runs(fn: Callable[..., Array], arrays: tuple[Array, ...], names: axes.Names) -> Array:
    """`fn(runs, …)` of arrays `batch seq [delta_heads …]`, by each device for its own sequences, positions and heads:
    `runs_batch length …` there. `names`: the result's first."""
    scope, seq = axes.current(), arrays[0].shape[1]
    placement = None if scope is None else scope.placement
    split = () if placement is None else placement.mesh_axes("seq")
    runs = Runs.of(split, np.arange(seq) if placement is None else placement.stored_positions(seq))

    def local(*arrays: Array) -> Array:
        return runs.joined(fn(runs, *map(runs.split, arrays)))

    if placement is None:
        return local(*arrays)
    if split:
        axes.log_choice("gated delta", f"states are passed on between {runs.count} runs of positions, over {split}")
    batch, positions, heads = placement.spec(("batch", "seq", "delta_heads"))
    specs = tuple(PartitionSpec(batch, positions, *[heads] * (x.ndim > 2)) for x in arrays)
    return axes.per_device(local, specs, placement.spec(names))(*map(axes.reshard, arrays, specs))


def _log_uniform(key: Array, names: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    """log of a number drawn from 0.01 to 16, as in transformers."""
    return jnp.log(0.01 + 15.99 * (jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) + 0.5) / 2**16)
