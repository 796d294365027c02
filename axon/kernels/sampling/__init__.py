"""Drawing the next token of each request: temperature, top-k, top-p and min-p, by the implementation that fits.

Every filter keeps the tokens whose logit is at least some number. So an implementation finds one number for each
request, the least logit that is kept, and the draw is the same for all of them (`draw.py`).
"""

import jax
import jax.numpy as jnp
from jax import Array

from axon.errors import UserError
from axon.kernels.choice import choose, with_tpu
from axon.kernels.sampling import tpu
from axon.kernels.sampling.draw import draw
from axon.kernels.sampling.reference import least_kept_reference
from axon.kernels.sampling.rules import Rules
from axon.kernels.sampling.tpu import least_kept_tpu
from axon.kernels.sampling.xla import least_kept_xla

__all__ = ["Rules", "least_kept_reference", "least_kept_tpu", "least_kept_xla", "sample"]

_IMPLEMENTATIONS = {"tpu": least_kept_tpu, "xla": least_kept_xla, "reference": least_kept_reference}


def sample(
    logits: Array,
    keys: Array,
    temperature: Array,
    top_k: Array | None = None,
    top_p: Array | None = None,
    min_p: Array | None = None,
) -> Array:
    """The next token of each request, its filters applied in this order, as vLLM and Hugging Face apply them.

    Args:
        logits: `batch vocab`, the whole vocabulary; read as float32. A token of −inf is never drawn.
        keys: `batch`, one JAX key a request. A request's draw is that of its key: it depends neither on the row that
            the request is in, nor on the other rows.
        temperature: `batch`, divides the logits; at 0 the first of the most likely tokens is taken.
        top_k: `batch`, integers: keep the k most likely tokens. Below 1, or as large as the vocabulary: all.
        top_p: `batch`: of these, keep the most likely, as few as have this fraction of their probability (nucleus
            sampling, Holtzman et al., arXiv:1904.09751). From 1 on: all.
        min_p: `batch`: keep those with at least this fraction of the most likely token's probability (Nguyen et al.,
            arXiv:2407.01082). 0: all.

    Tokens of the same logit are kept or dropped together, so top-k may keep more than k.
    The most likely is always kept.

    Returns: `batch` ids, int32. Raises `UserError` where the shapes do not fit each other.
    """
    _check(logits, keys, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p})
    logits = logits.astype(jnp.float32)
    rules = Rules.of(logits, temperature, top_k, top_p, min_p)
    candidates = with_tpu(tpu.unfit(logits), {"xla": None, "reference": None})
    chosen = choose("sampling", candidates, f"{logits.shape[0]} × {logits.shape[1]} logits")
    return draw(logits, rules.least_of(_IMPLEMENTATIONS[chosen](logits, rules)), keys, rules)


def _check(logits: Array, keys: Array, settings: dict[str, Array | None]) -> None:
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise UserError(f"sampling: logits are {logits.dtype}{list(logits.shape)}; give floats, batch × vocab")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise UserError(f"sampling: keys are {keys.dtype}{list(keys.shape)}; expected keys of jax.random.key, batch")
    for name, value in {"keys": keys, **settings}.items():
        if value is not None and value.shape != logits.shape[:1]:
            shape, batch = list(value.shape), logits.shape[0]
            raise UserError(f"sampling: {name} has shape {shape}, and there are {batch} requests; give one for each")
