"""Logits of whole sequences, all at once."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from axon import axes
from axon.axes.specs import mesh_axes_of
from axon.errors import UserError
from axon.layout import Placement
from axon.nn import Inputs, LanguageModel
from axon.runtime import Runtime
from axon.serve.text_model import check_writes, vocab_of
from axon.serve.unsplit import unsplit


def logits(runtime: Runtime, parameters: Any, variables: Any, tokens: ArrayLike) -> np.ndarray:
    """Logits `batch seq vocab`, float32, of ids `tokens`, `batch seq`, whose rows are a document each.

    Raises `UserError` for a model that is no `LanguageModel`, and for ids that its vocabulary lacks.
    """
    ids = _checked(runtime, tokens)
    placement = unsplit(runtime.placement, "seq")
    missing = -len(ids) % row_shards(placement)

    def computed(parameters: Any, variables: Any, tokens: Array) -> Array:
        tokens = axes.shard(tokens, "batch seq")
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        model = runtime.bind(parameters, variables)
        hidden, *_ = model.hidden(Inputs(tokens, axes.shard(positions, "batch seq")))
        return axes.shard(model.output.logits(hidden), "batch seq vocab.whole").astype(jnp.float32)

    with runtime.tracing(placement):
        found = runtime.jit(computed)(parameters, variables or {}, np.pad(ids, ((0, missing), (0, 0))))
    return np.asarray(found)[: len(ids), :, : vocab_of(runtime.module)]


def row_shards(placement: Placement) -> int:
    """Into how many parts a batch's rows are split: their number is a multiple of it."""
    return math.prod(placement.mesh.shape[axis] for axis in mesh_axes_of(placement.spec(("batch", "seq"))))


def _checked(runtime: Runtime, tokens: ArrayLike) -> np.ndarray:
    module, ids = runtime.module, np.asarray(tokens)
    if not isinstance(module, LanguageModel):
        raise UserError(f"logits: the model is a {type(module).__name__}; expected an axon.nn.LanguageModel")
    check_writes(module)
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"logits: tokens are {ids.dtype} of shape {ids.shape}; expected integers `batch seq`")
    vocab = vocab_of(runtime.module)
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"logits: tokens are {ids.min()} to {ids.max()}; must be 0 to {vocab - 1}")
    return ids.astype(np.int32)
