"""Multi-head latent attention: keys and values made from a few numbers a token, which are all that is cached."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.axes import einsum, shard
from axon.kernels.attention import AttentionConfig, Mask, mean_keys
from axon.nn.attend import attend
from axon.nn.cache import CacheSpec
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.kv_cache import KVCache, PagedSizes, PagedStep, cached_latent_attention, latent_cache_specs, paged_sizes
from axon.nn.norm import RMSNorm
from axon.nn.param import Dims, Param, fan_in
from axon.nn.rope import Rope, rotate

LATENTS = "batch seq.residual embed, embed {0} -> batch seq.residual {0}"
"""Made where the residual stream is: with sequence parallelism it is these that are gathered, and not the stream."""


class LatentAttention(nnx.Module):
    """Heads whose keys and values come from one latent a token (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Of a token x, with position t and rotation R, norms left out, head h has

        c = x·kv_down                                                 `kv_latent`: all heads' keys and values
        k = [c·key_h ; R_t(x·key_rope)]      v = c·value_h            the rotated part is the same for all heads
        q = [z·query_h ; R_t(z·query_rope_h)]  where z = x·query_down `q_latent`; or x itself
        out = Σ_h softmax(q·kᵀ·scale)·v·out_h                         scale = 1/√(nope_dim + rope_dim), times the rope's

    A cache has [c ; R_t(x·key_rope)] alone, and attention over it is *absorbed*: c·key_hᵀ·q is c·(key_h·q), so that no
    key is made: all heads attend with [key_h·q ; …] to the same latents, and value_h comes after the sum over tokens.

    Args:
        dims: sizes of embed, heads, nope_dim, rope_dim, value_dim and kv_latent; and of q_latent, if queries have one.
        mask: which keys a query sees. rope: rotates the last rope_dim numbers of queries and keys, of which neighbours
            are a pair if they are `interleaved` (see `axon.nn.rope.rotate`).
        norm_eps: of the latents' RMSNorm. out_scale: of the output projection's initial values.
    """

    remat_names = ("q_latent", "kv_latent", "query", "key", "value", "attention")
    """The activations that a remat policy can keep by name. From the latents alone queries, keys and values are made
    again at the price of their projections."""

    def __init__(
        self,
        dims: Dims,
        mask: Mask,
        *,
        rope: Rope,
        interleaved: bool = False,
        norm_eps: float = 1e-6,
        out_scale: float = 1.0,
    ):
        self.rope, self.interleaved, self.dims = rope, interleaved, dict(dims)
        self.width = dims["nope_dim"] + dims["rope_dim"]
        self.heads = dims["heads"]
        self.config = AttentionConfig(mask, self.width**-0.5 * rope.score_scale)
        self.query_input = "q_latent" if "q_latent" in dims else "embed"
        if self.query_input == "q_latent":
            self.query_down = Param("embed q_latent", dims)
            self.query_norm = RMSNorm("q_latent", dims, norm_eps)
        source = "q_latent.up" if self.query_input == "q_latent" else "embed"
        self.query = Param(f"{source} heads nope_dim", dims)
        self.query_rope = Param(f"{source} heads rope_dim", dims)
        self.kv_down = Param("embed kv_latent", dims)
        self.kv_norm = RMSNorm("kv_latent", dims, norm_eps)
        self.key_rope = Param("embed rope_dim", dims)
        self.key = Param("kv_latent.up heads nope_dim", dims)
        self.value = Param("kv_latent.up heads value_dim", dims)
        self.out = Param("heads value_dim embed", dims, fan_in("heads value_dim", out_scale))

    @jax.named_scope("attention")
    def __call__(self, x: Array, inputs: Inputs, cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
        """`x[batch seq embed]` → `batch seq.residual embed`, and the cache with the latents of `x` in it."""
        angles = inputs.angles_of(self.rope, self.dims["rope_dim"])
        q, q_rope = self._queries(x)
        q_rope = rotate(q_rope, angles, self.interleaved)
        latent = self.kv_norm(einsum(LATENTS.format("kv_latent"), x, self.kv_down), "batch seq.residual kv_latent")
        latent = checkpoint_name(latent, "kv_latent")
        k_rope = shard(einsum(LATENTS.format("rope_dim"), x, self.key_rope), "batch seq rope_dim")
        k_rope = rotate(k_rope[:, :, None], angles, self.interleaved)
        if cache is None:
            out = self._expanded(q, q_rope, latent, k_rope, inputs)
        else:
            step = inputs.step_of(self.paged_sizes(inputs, cache))
            out, cache = self._absorbed(q, q_rope, latent, k_rope, cache, step)
        out = einsum("batch seq heads value_dim, heads value_dim embed -> batch seq.residual embed", out, self.out)
        return out, cache

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The (rope, width) whose angles it uses."""
        return ((self.rope, self.dims["rope_dim"]),)

    def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
        """A cache of the latents of `length` tokens a sequence: kv_latent + rope_dim numbers each."""
        return latent_cache_specs(batch, length, self.dims["kv_latent"] + self.dims["rope_dim"])

    def paged_sizes(self, inputs: Inputs, cache: KVCache) -> PagedSizes:
        """The sizes that a step over such a cache depends on."""
        return paged_sizes(cache, inputs.tokens.shape, self.dims["heads"], self.config)

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token in training: its projections, and its products with the keys and values that it
        sees on average, of widths nope_dim + rope_dim and value_dim."""
        products = 2 * self.dims["heads"] * (self.width + self.dims["value_dim"]) * mean_keys(self.config.mask, seq)
        return matmul_flops(self) + round(products)

    def _queries(self, x: Array) -> tuple[Array, Array]:
        """`batch seq heads nope_dim`, which is not rotated, and `batch seq heads rope_dim`, which is yet to be."""
        if self.query_input == "q_latent":
            x = einsum(LATENTS.format("q_latent"), x, self.query_down)
            x = checkpoint_name(self.query_norm(x, "batch seq.residual q_latent"), "q_latent")
        pattern = "batch seq {0}, {0} heads {1} -> batch seq heads {1}"
        q = einsum(pattern.format(self.query_input, "nope_dim"), x, self.query)
        return q, einsum(pattern.format(self.query_input, "rope_dim"), x, self.query_rope)

    def _expanded(self, q: Array, q_rope: Array, latent: Array, k_rope: Array, inputs: Inputs) -> Array:
        """Attention with the keys and values of every head, `batch seq heads value_dim`.

        They are made where attention looks at them: where positions are exchanged for heads it is the latents that are
        gathered, and each device makes its own heads of them.
        """
        pattern = "batch seq.attention kv_latent, kv_latent heads {0} -> batch seq.attention heads.attention {0}"
        k = einsum(pattern.format("nope_dim"), latent, self.key)
        v = einsum(pattern.format("value_dim"), latent, self.value)
        each = shard(jnp.ones(self.heads, k_rope.dtype), "heads.attention")[:, None]  # once a head, on its devices
        k_rope = shard(k_rope[:, :, 0], "batch seq.attention rope_dim")[:, :, None]
        q, k = jnp.concatenate([q, q_rope], axis=-1), jnp.concatenate([k, k_rope * each], axis=-1)
        q, k, v = (checkpoint_name(a, n) for a, n in ((q, "query"), (k, "key"), (v, "value")))
        return attend(q, k, v, self.config, inputs)

    def _absorbed(
        self, q: Array, q_rope: Array, latent: Array, k_rope: Array, cache: KVCache, step: PagedStep
    ) -> tuple[Array, KVCache]:
        """Attention to latents, `batch seq heads value_dim`, and the cache with the new ones in it."""
        q = einsum("batch seq heads nope_dim, kv_latent heads nope_dim -> batch seq heads kv_latent", q, self.key)
        q = jnp.concatenate([q, q_rope], axis=-1)
        latent = shard(latent, "batch seq kv_latent")
        k = jnp.concatenate([latent, k_rope[:, :, 0]], axis=-1)
        out, cache = cached_latent_attention(q, k, self.config, cache, step)
        out = out[..., : self.dims["kv_latent"]]
        pattern = "batch seq heads kv_latent, kv_latent heads value_dim -> batch seq heads value_dim"
        return einsum(pattern, out, self.value), cache
