"""Flash attention on NVIDIA GPUs by cuDNN, forward and backward: the two primitives that jax 0.12.0.1 has for it.

`jax.nn.dot_product_attention(implementation="cudnn")` binds the same two. It rounds the log-sum-exp to the operands'
dtype, gives what its backward needs no name, and has no backward over a part of the keys: so its derivative is ours.

cuDNN itself knows causal masks and windows, and skips the tiles that they hide. Whatever else a mask says (documents, a
prefix, queries that start later) is added to the scores as 0 or a large negative number, once for all heads.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from axon.axes import log_choice
from axon.kernels.attention.flash import NAME, input_gradients
from axon.kernels.attention.mask import Causal, Everything, Mask, Prefix, SameDocument, Window, rules
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.attention.xla import attention_gradients_xla
from axon.kernels.hopper import is_hopper

DTYPES = (jnp.bfloat16, jnp.float16)

HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""What is added to the score of a pair that the mask hides: so large that its power is 0 beside any other, and finite,
as cuDNN subtracts such scores from each other."""

MOST_BIAS = 2**30
"""Bytes of the bias of a mask, which grow with queries × keys: with more, XLA's blocks take less memory."""


def attention_cudnn(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs = AttentionInputs()
) -> tuple[Array, Array]:
    """See `axon.kernels.attention.attention_and_lse`."""
    sdpa = _Attention.of(q, k, config, inputs)
    out, lse = sdpa.differentiable()(q, k, v, inputs._replace(start=jnp.asarray(inputs.start, jnp.int32)))
    return out, lse.swapaxes(1, 2)


def attention_gradients_cudnn(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    rows: tuple[Array, Array, Array],
    out: Array,
) -> tuple[Array, Array, Array]:
    """See `axon.kernels.attention.attention_gradients`; in the dtype of the operands."""
    dout, lse, _ = rows
    return _Attention.of(q, k, config, inputs).backward(q, k, v, inputs, out, lse.swapaxes(1, 2), dout)


def unsupported(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs, chip: str
) -> str | None:
    """Why cuDNN cannot run this on a `jax.Device.device_kind`; None if it can."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        kinds = ", ".join(dict.fromkeys(x.dtype.name for x in (q, k, v)))
        return f"it computes in bfloat16 or float16, not {kinds}"
    if "NVIDIA" not in chip:
        return f"it is for NVIDIA GPUs, not {chip or 'an unknown chip'}"
    if config.soft_cap is not None:
        return "it has no soft cap"
    if inputs.alibi_slopes is not None or inputs.distance_bias is not None:
        return "it adds no slopes or bias by distance to the scores"
    if (narrow := _too_wide(q.shape[3], v.shape[3], chip)) is not None:
        return narrow
    return _no_bias(q, k, config.mask, inputs)


def takes_bias(q: Array, k: Array, mask: Mask, inputs: AttentionInputs) -> bool:
    """Whether a part of the mask has to be said as a bias, of all pairs: then no tile that it hides is skipped."""
    return Form.of(mask, q.shape[1], k.shape[1], inputs).rest is not None


def _no_bias(q: Array, k: Array, mask: Mask, inputs: AttentionInputs) -> str | None:
    """Why what cuDNN does not know of a mask cannot be a bias; None if it can, or nothing has to be."""
    (batch, queries), keys = q.shape[:2], k.shape[1]
    rest = Form.of(mask, queries, keys, inputs).rest
    if rest is None:
        return None
    if queries % 2 or keys % 2:
        return f"with mask {mask} it takes even lengths, not {queries} queries and {keys} keys"
    size = (batch if rest.by_document else 1) * queries * keys * q.dtype.itemsize
    if size > MOST_BIAS:
        return f"with mask {mask} it takes a bias, here of {size / 2**30:.1f} GiB: {MOST_BIAS / 2**30:.0f} at most"
    return None


def _too_wide(width: int, value: int, chip: str) -> str | None:
    """Why keys and values of these widths do not fit; None if they do."""
    hopper = is_hopper(chip)
    most = 256 if hopper else 128
    if (width == value and width <= most and width % 8 == 0) or (hopper and (width, value) == (192, 128)):
        return None
    known = f"multiples of 8 up to {most}" + (", and 192 (values 128)" if hopper else "")
    return f"on {chip} it supports head_dim {known}, not {width}" + (f" (values {value})" if value != width else "")


@dataclass(frozen=True)
class Form:
    """How a mask is said to cuDNN: `causal`, and a `window` of keys that ends at the query, are its own.

    `rest` is the mask of what it does not know, said as a bias; None for nothing. cuDNN counts queries and keys from
    the first of each: its causal mask is ours where queries start at key 0.
    """

    causal: bool = False
    window: int | None = None
    rest: Mask | None = None

    @classmethod
    def of(cls, mask: Mask, queries: int, keys: int, inputs: AttentionInputs) -> "Form":
        start = inputs.constant_start
        found = [rule for rule in rules(mask) if not isinstance(rule, Everything)]
        if inputs.documents is None:
            found = [rule for rule in found if not isinstance(rule, SameDocument)]
        if start is not None:
            reach = (start, start + queries, 0, keys)
            found = [rule for rule in found if rule.by_document or not rule.sees_all(*reach)]
        own: list[Mask] = []
        if start == 0 and queries == keys and any(isinstance(rule, Causal) for rule in found):
            # Causal allows less than any prefix, so that a prefix beside it says nothing.
            own = [rule for rule in found if isinstance(rule, Causal | Window | Prefix)]
        window = min((rule.size for rule in own if isinstance(rule, Window)), default=None)
        rest = [rule for rule in found if rule not in own]
        return cls(bool(own), window, reduce(and_, rest) if rest else None)

    def bias(self, q: Array, k: Array, inputs: AttentionInputs) -> Array | None:
        """`batch 1 seq kv_seq`, or 1 for `batch`: 0 for a pair that `rest` allows, else `HIDDEN`."""
        if self.rest is None:
            return None
        documents = inputs.documents and (inputs.documents[0][:, :, None], inputs.documents[1][:, None, :])
        queries, keys = inputs.start + jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
        seen = self.rest.allowed(queries, keys, documents)
        assert seen is not None  # a rule that allows all is not in `rest`
        bias = jnp.where(seen, jnp.zeros((), q.dtype), jnp.asarray(HIDDEN[q.dtype.name], q.dtype))
        return bias.reshape(-1, 1, q.shape[1], k.shape[1])


@dataclass(frozen=True)
class _Attention:
    """Both calls of cuDNN for one problem; log-sum-exps are `batch heads seq`, −∞ for a query that sees no key.

    `start` is that of `AttentionInputs` where it is a constant.
    """

    config: AttentionConfig
    form: Form
    start: int | None

    @classmethod
    def of(cls, q: Array, k: Array, config: AttentionConfig, inputs: AttentionInputs) -> "_Attention":
        start = inputs.constant_start
        return cls(config, Form.of(config.mask, q.shape[1], k.shape[1], inputs), start)

    def differentiable(self) -> Callable[..., tuple[Array, Array]]:
        @jax.custom_vjp
        def attend(q, k, v, inputs):
            return self.forward(q, k, v, inputs)

        def forward(*operands):
            q, k, v, inputs = jax.tree.map(lambda x: x.value, operands, is_leaf=lambda x: hasattr(x, "perturbed"))
            out, lse = (checkpoint_name(x, NAME) for x in self.forward(q, k, v, inputs))
            return (out, lse), (q, k, v, inputs, out, lse)

        def backward(residuals, cotangents):
            q, k, v, inputs, out, lse = residuals
            dout, dlse = cotangents
            dout = jnp.zeros_like(out) if isinstance(dout, SymbolicZero) else dout
            total = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
            if isinstance(dlse, SymbolicZero):
                gradients = self.backward(q, k, v, inputs, out, lse, dout)
            else:
                total -= dlse
                gradients = self._with_lse(q, k, v, inputs, lse, dout, total)
            return *gradients, input_gradients(inputs, lse, total)

        attend.defvjp(forward, backward, symbolic_zeros=True)
        return attend

    def forward(self, q: Array, k: Array, v: Array, inputs: AttentionInputs) -> tuple[Array, Array]:
        bias = self.form.bias(q, k, inputs)
        out, lse = call_forward(q, k, v, bias, self.config.scale, self.form)
        if bias is not None:  # of a query that sees no key cuDNN makes the mean of the values
            lse = jnp.where(lse < HIDDEN[q.dtype.name] / 2, -jnp.inf, lse)
            out = jnp.where(_by_row(lse) == -jnp.inf, jnp.zeros((), out.dtype), out)
        if inputs.sinks is None:
            return out, lse
        total = jnp.logaddexp(lse, inputs.sinks.astype(jnp.float32)[:, None])
        return (out.astype(jnp.float32) * _by_row(jnp.exp(lse - total))).astype(out.dtype), total

    def backward(
        self, q: Array, k: Array, v: Array, inputs: AttentionInputs, out: Array, lse: Array, dout: Array
    ) -> tuple[Array, Array, Array]:
        """Of dO and the log-sum-exp over all keys, these and others; cuDNN takes D from `out`, over all keys too."""
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # so that no weight is left
        out, dout = out.astype(q.dtype), dout.astype(q.dtype)
        return call_backward(q, k, v, self.form.bias(q, k, inputs), (lse, out, dout), self.config.scale, self.form)

    def _with_lse(
        self, q: Array, k: Array, v: Array, inputs: AttentionInputs, lse: Array, dout: Array, total: Array
    ) -> tuple[Array, Array, Array]:
        """Where the log-sum-exp is differentiated too, as D = Σ out·dout − dlse says."""
        log_choice("attention gradient", f"xla, {self.config} (not cudnn: the log-sum-exp is differentiated too)")
        inputs = inputs._replace(sinks=None, start=inputs.start if self.start is None else self.start)
        rows = dout, lse.swapaxes(1, 2), total.swapaxes(1, 2)
        dq, dk, dv = attention_gradients_xla(q, k, v, self.config, inputs, rows)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _by_row(x: Array) -> Array:
    """`batch heads seq` → `batch seq heads 1`."""
    return x.swapaxes(1, 2)[..., None]


def call_forward(q: Array, k: Array, v: Array, bias: Array | None, scale: float, form: Form) -> tuple[Array, Array]:
    """cuDNN's forward: softmax(scale·q·kᵀ + bias)·v, and each query's log-sum-exp of those scores, `batch heads seq`.

    Operands `batch seq heads head_dim`, keys and values with as few heads as they have.
    """
    operands, constants = _said(q, bias, scale, form)
    out, lse = jax_cudnn._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *operands, **constants, is_training=True)
    return out, lse


def call_backward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    rows: tuple[Array, Array, Array],
    scale: float,
    form: Form,
) -> tuple[Array, Array, Array]:
    """cuDNN's backward, of each query's log-sum-exp, `batch heads seq`, its output and its dO: dq, dk, dv."""
    operands, constants = _said(q, bias, scale, form)
    dq, dk, dv = jax_cudnn._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *operands, *rows, **constants)
    return dq, dk, dv


def _said(q: Array, bias: Array | None, scale: float, form: Form) -> tuple[list[Array], dict[str, Any]]:
    """The operands besides queries, keys and values, and the constants, that both primitives have."""
    absent = jnp.zeros(0, q.dtype)  # lengths and offsets of queries and keys, tables of pages
    kind = jax_cudnn.MaskType.CAUSAL if form.causal else jax_cudnn.MaskType.NO_MASK
    constants = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # whether there is a bias, and whether its gradient is wanted
        "mask_type": kind,
        "layout": jax_cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": form.window,
    }
    if "score_mod" in inspect.signature(jax_cudnn._dot_product_attention_fwd_impl).parameters:  # since jax 0.12
        constants["score_mod"] = None
    return [absent if bias is None else bias, *6 * [absent]], constants
