"""How much arithmetic a model is: each module counts its own."""

import math
from typing import Any

from flax import nnx

from axon.axes import CompositeWeight
from axon.nn.param import Param


def forward_flops(module: Any, seq: int) -> int:
    """FLOPs of one token's forward pass through `module`, in a sequence of `seq` tokens.

    What the module says itself, by a method `flops(seq)`; else a multiply and an add for each element of its matrices,
    and its children's.
    """
    if hasattr(module, "flops"):
        return module.flops(seq)
    weights = nnx.Variable | CompositeWeight
    children = (child for _, child in nnx.iter_children(module) if not isinstance(child, weights))
    return matmul_flops(module) + sum(forward_flops(child, seq) for child in children)


def matmul_flops(module: nnx.Module) -> int:
    """FLOPs of one token's products with the module's own matrices: those of one layer, where they are stacked."""
    own = list(vars(module).values())
    matrices = (value for value in own if isinstance(value, Param) and value.decay)
    composite = (value for value in own if isinstance(value, CompositeWeight) and isinstance(value, nnx.Module))
    return sum(2 * math.prod(p.get_value().shape[len(p.stack) :]) for p in matrices) + sum(map(matmul_flops, composite))
