"""Multi-token prediction: a block after the last one, which predicts one token further."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from axon.axes import einsum, in_block, shard
from axon.nn.auxiliary import Auxiliary
from axon.nn.inputs import Inputs
from axon.nn.param import Dims, Param, fan_in
from axon.nn.remat import remat_of, with_remat

RESIDUAL = "batch seq.residual embed"
JOIN = f"{RESIDUAL}, embed embed_out -> batch seq.residual embed_out"

KIND = "multi_token"
"""The block's kind, as `Layout.context` names it."""


class MultiTokenBlock(nnx.Module):
    """Of h_i, a model's output at position i, and of the next token's embedding e_{i+1}, what token i + 2 is predicted
    from (DeepSeek-V3, arXiv:2412.19437, section 2.2, at depth 1):

        norm(block([norm(e_{i+1}) ; norm(h_i)]·M)),   M the matrices `from_embedding` and `from_hidden`.

    Position i sees positions up to i of its document, and so tokens up to i + 1. Embedding and head are the model's.

    Args:
        block: like those of the model's depth, parameters not stacked; kind: the kind of those, whose remat policy is
            its own. norm: makes a norm over an axis, as the model's.
    """

    def __init__(self, dims: Dims, block: nnx.Module, *, kind: str, norm: Callable[[str], nnx.Module]):
        dims = {**dims, "embed_out": dims["embed"]}
        self.embedding_norm, self.hidden_norm = (norm("embed") for _ in range(2))
        self.from_embedding, self.from_hidden = (
            Param("embed embed_out", dims, fan_in("embed", 2**-0.5)) for _ in range(2)
        )
        self.block, self.kind = block, kind
        self.norm = norm("embed")

    @property
    def blocks(self) -> dict[str, nnx.Module]:
        """Kind → its block."""
        return {KIND: self.block}

    @jax.named_scope("multi_token")
    def __call__(
        self, hidden: Array, embedded: Array, inputs: Inputs, cache: Any = None
    ) -> tuple[Array, Any, Auxiliary]:
        """`hidden, embedded[batch seq.residual embed]` → the same, the block's cache, if there is one, with these
        positions in it, and its auxiliary terms."""
        joined = einsum(JOIN, self.embedding_norm(embedded, RESIDUAL), self.from_embedding)
        joined += einsum(JOIN, self.hidden_norm(hidden, RESIDUAL), self.from_hidden)
        graph, values = nnx.split(self.block)

        def run(x: Array, part: tuple[nnx.State, Any]) -> tuple[Array, Any, Auxiliary]:
            values, cache = part
            with in_block(KIND):
                return nnx.merge(graph, values)(x, inputs, cache)

        run = with_remat(run, remat_of(self.kind), self.block, in_scan=False)
        x, cache, auxiliary = run(shard(joined, RESIDUAL), (values, cache))
        return self.norm(x, RESIDUAL), cache, auxiliary.within("block")
