"""How much arithmetic a model is: each module counts its own."""

import math
from collections.abc import Collection
from typing import Any

from flax import nnx

from axon.axes import CompositeWeight
from axon.nn.capabilities import ChoosesExperts, CountsFlops
from axon.nn.param import Param, parameters


def forward_flops(module: Any, seq: int) -> int:
    """FLOPs of one token's forward pass through `module`, in a sequence of `seq` tokens.

    What the module says itself, by a method `flops(seq)`; else a multiply and an add for each element of its matrices,
    and its children's.
    """
    if isinstance(module, CountsFlops):
        return module.flops(seq)
    return matmul_flops(module) + sum(forward_flops(child, seq) for _, child in _children(module))


def matmul_flops(module: nnx.Module) -> int:
    """FLOPs of one token's products with the module's own matrices: those of one layer, where they are stacked."""
    return sum(_own_matrices(module).values())


def weight_flops(weight: Any) -> int:
    """FLOPs of one token's product with a weight: of one that a transform made, with all of its parts."""
    return sum(_of_weight("", weight).values())


def training_flops(module: Any, seq: int, frozen: Collection[str] = (), below: bool = True) -> int:
    """FLOPs of one token's forward and backward passes through `module`.

    The backward of a product is two: one makes its weight's gradient, unless the weight is `frozen` (its path in the
    module), and one passes the gradient on, if there is a parameter to reach: in the module, or `below` it.
    """
    forward, weights = forward_flops(module, seq), _weights(module, seq)
    trained = sum(flops for path, flops in weights.items() if path not in frozen)
    passed_on = 2 * forward - sum(weights.values())  # what multiplies no weight has two operands to pass it on to
    return forward + trained + (passed_on if below or is_trained(module, frozen) else 0)


def is_trained(module: Any, frozen: Collection[str]) -> bool:
    """Whether any parameter of `module` is not `frozen`, by their paths in it."""
    return any(path not in frozen for path in parameters(module))


def paths_in(name: str, paths: Collection[str]) -> frozenset[str]:
    """Of `paths` those in the child `name`, as they are called in it."""
    return frozenset(path.removeprefix(f"{name}/") for path in paths if path.startswith(f"{name}/"))


def _weights(module: Any, seq: int) -> dict[str, int]:
    """Path → forward FLOPs of one token's products with this matrix; less where the module says that it does less."""
    found = _own_matrices(module)
    for name, child in _children(module):
        found |= {f"{name}/{path}": flops for path, flops in _weights(child, seq).items()}
    most, total = forward_flops(module, seq), sum(found.values())
    return {path: flops * most // total for path, flops in found.items()} if total > most else found


def _children(module: Any) -> list[tuple[Any, Any]]:
    weights = nnx.Variable | CompositeWeight
    return [(name, child) for name, child in nnx.iter_children(module) if not isinstance(child, weights)]


def _own_matrices(module: Any) -> dict[str, int]:
    """Name → FLOPs of one token's products with it; of `experts` matrices those that a token chooses."""
    flops = {}
    for name, value in vars(module).items():
        flops |= _of_weight(name, value)
    chosen, experts = module.chosen_experts if isinstance(module, ChoosesExperts) else (1, 1)
    return {name: value * chosen // experts for name, value in flops.items()}


def _of_weight(name: str, value: Any) -> dict[str, int]:
    """Path → FLOPs of one token's products with each matrix that a weight is made of; none of what is no weight."""
    if isinstance(value, Param):
        return {name: 2 * math.prod(value.get_value().shape[len(value.stack) :])} if value.decay else {}
    if isinstance(value, CompositeWeight) and isinstance(value, nnx.Module):
        if isinstance(value, CountsFlops):
            return {f"{name}/{next(iter(parameters(value)))}": value.flops(0)}
        return {f"{name}/{path}": flops for path, flops in _own_matrices(value).items()}
    return {}
