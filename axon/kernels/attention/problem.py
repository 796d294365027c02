"""The problem that an attention kernel solves, besides its queries, keys and values."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from axon.kernels.attention.fp8 import FP8Products
from axon.kernels.attention.mask import Documents, Mask


@dataclass(frozen=True)
class AttentionConfig:
    """How scores are computed: constants of the program.

    Args:
        mask: which keys a query sees. scale: of q·k.
        soft_cap: scores s become `soft_cap·tanh(s / soft_cap)` (Gemma 2, arXiv:2408.00118); None for none.
        products: what both products of the forward are made in; None: in the dtype of the operands.
    """

    mask: Mask
    scale: float
    soft_cap: float | None = None
    products: FP8Products | None = None

    def __str__(self) -> str:
        soft_cap = "" if self.soft_cap is None else f", soft cap {self.soft_cap:g}"
        return str(self.mask) + soft_cap + ("" if self.products is None else f", {self.products}")


class AttentionInputs(NamedTuple):
    """The arrays besides queries, keys and values; None for those that are absent.

    Attributes:
        documents: of each query and of each key, `batch seq` and `batch kv_seq`.
        start: index of the first query among the keys; traced, or a constant.
        sinks: `heads`, a score of each head that takes part in the softmax and has no value (arXiv:2309.17453).
        alibi_slopes: `heads`; `slope·(key − query)`, of their indices, is added to the scores (arXiv:2108.12409).
        distance_bias: `heads 2·kv_seq−1`, added to the scores (T5's relative position bias, arXiv:1910.10683): of a key
            and a query with the element `kv_seq − 1 + key − query`, of their indices.
    """

    documents: Documents = None
    start: Array | int = 0
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    distance_bias: Array | None = None

    @property
    def constant_start(self) -> int | None:
        """`start` where it is a constant; None where it is known only at run time."""
        return self.start if isinstance(self.start, int) else None
