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
from axon.kernels.gated_delta import delta_step, gated_delta
from axon.nn.cache import CacheSpec
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.norm import RMSNorm
from axon.nn.param import Dims, Param, constant, fan_in

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
        return {name: _whole(look_back, (x, inputs.positions), names) for name, x in projected.items()}, None


def _step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    return delta_step(state, *token)


def _mixed(window: Array, taps: Param) -> Array:
    names = " ".join(taps.axes[:-1])
    return einsum(f"batch seq conv_taps {names}, {names} conv_taps -> batch seq {names}", window, taps)


def _window(taps: int, x: Array, positions: Array) -> Array:
    """`batch seq conv_taps …`: each token's channels after those of the tokens before, 0 beyond its document."""
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), *[(0, 0)] * (x.ndim - 2)))

    def before(n: int) -> Array:
        tokens = lax.slice_in_dim(padded, taps - 1 - n, taps - 1 - n + x.shape[1], axis=1)
        return jnp.where(positions.reshape(*positions.shape, *[1] * (x.ndim - 2)) >= n, tokens, 0)

    return jnp.stack([before(n) for n in reversed(range(taps))], axis=2)


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def _over_documents(operands: tuple[Array, ...], inputs: Inputs) -> Array:
    """The outputs of the gated delta rule over the documents of each sequence."""
    documents = jnp.zeros(inputs.tokens.shape, jnp.int32) if inputs.documents is None else inputs.documents
    return _whole(gated_delta, (*operands, documents), ("batch", "seq", "delta_heads"))


def _whole(fn: Callable[..., Array], arrays: tuple[Array, ...], names: axes.Names) -> Array:
    """`fn` of arrays `batch seq [delta_heads …]`, by each device for its own sequences and heads; the positions of a
    sequence are whole there, in their order, however the layout splits and stores them. `names`: the result's first."""
    scope = axes.current()
    if scope is None:
        return fn(*arrays)
    placement, seq = scope.placement, arrays[0].shape[1]
    order = placement.stored_positions(seq)
    stored = np.array_equal(order, np.arange(seq))
    batch, positions, heads = placement.spec(("batch", "seq", "delta_heads"))
    if positions:
        axes.log_choice("gated delta", f"positions gathered over {positions}: each device computes whole sequences")

    def local(*arrays: Array) -> Array:
        if stored:
            return fn(*arrays)
        return fn(*(x[:, np.argsort(order)] for x in arrays))[:, order]

    specs = tuple(PartitionSpec(batch, None, *[heads] * (x.ndim > 2)) for x in arrays)
    own = PartitionSpec(
        *(None if name == "seq" else entry for name, entry in zip(names, placement.spec(names), strict=True))
    )
    result = axes.per_device(local, specs, own)(*map(axes.reshard, arrays, specs))
    return axes.reshard(result, placement.spec(names))


def _log_uniform(key: Array, names: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    """log of a number drawn from 0.01 to 16, as in transformers."""
    return jnp.log(0.01 + 15.99 * (jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) + 0.5) / 2**16)
