"""A decoder-only language model: embedding, blocks, norm, head."""

import math
from typing import Any

from flax import nnx
from jax import Array

from axon.nn import memory
from axon.nn.embedding import Embedding
from axon.nn.head import Head
from axon.nn.inputs import Inputs
from axon.nn.loss import cross_entropy
from axon.nn.memory import Memory
from axon.nn.param import Dims, Param
from axon.nn.rope import Rope
from axon.nn.stack import Remat, Stack

RESIDUAL = "batch seq.residual embed"
"""The stream between blocks."""


class LanguageModel(nnx.Module):
    """Token ids in, a distribution over the next id out.

    Args:
        dims: sizes of vocab, embed, heads, kv_heads, head_dim, mlp.
        block, layers: the block and how often it is stacked; norm: the last one; tied: whether the head is the
            embedding's table; rope: rotary embedding, None for models with positions of another kind.
        vocab: how many ids there are, where `dims` has more: those beyond are never predicted and never counted.
    """

    def __init__(
        self,
        dims: Dims,
        block: nnx.Module,
        layers: int,
        norm: nnx.Module,
        *,
        tied: bool,
        rope: Rope | None,
        embedding_stddev: float,
        vocab: int | None = None,
        remat: Remat = "none",
        unroll: bool | None = None,
    ):
        self.embedding = Embedding("vocab", dims, embedding_stddev)
        self.layers = Stack(block, layers, remat, unroll)
        self.norm = norm
        if not tied:
            self.head = Param("embed vocab", dims)
        self.tied, self.rope, self.dims, self.depth = tied, rope, dict(dims), layers
        self.vocab = None if vocab == dims["vocab"] else vocab

    def embed(self, inputs: Inputs) -> Array:
        """`batch seq.residual embed`: where the residual stream begins."""
        return self.embedding(inputs.tokens)

    def hidden(self, inputs: Inputs, memory: Any = None) -> tuple[Array, Any]:
        """The last layer's normalised output, `batch seq.residual embed`, and the memory of keys and values."""
        x = self.embed(inputs)
        angles = None if self.rope is None else self.rope.angles(inputs.positions, self.dims["head_dim"])
        x, memory = self.layers(x, inputs, angles, memory=memory)
        return self.norm(x, RESIDUAL), memory

    @property
    def output(self) -> Head:
        """What makes logits of `hidden`."""
        return Head(self.embedding.table if self.tied else self.head, self.vocab)

    @property
    def matmul_parameters(self) -> int:
        """Parameters that are multiplied with: all matrices, the head's among them, without tables of look-ups."""
        flat = nnx.to_flat_state(nnx.state(self, Param))
        matrices = {path: p for path, p in flat if p.decay}
        used = [p for path, p in matrices.items() if path[-1] != "table" or (self.tied and path[0] == "embedding")]
        return sum(math.prod(p.get_value().shape) for p in used)

    def loss(self, inputs: Inputs, targets: Array, weights: Array, z_loss: float = 0.0) -> tuple[Array, Array]:
        """Sums over tokens in nats: `(objective, nll)`, see `axon.nn.loss.cross_entropy`."""
        x, _ = self.hidden(inputs)
        return cross_entropy(x, self.output, targets, weights, z_loss)

    def memory(self, batch: int, length: int) -> Memory:
        """Room for the keys and values of `length` tokens a row, in every layer."""
        return memory.empty(self.depth, batch, length, self.dims["kv_heads"], self.dims["head_dim"])
