"""FLOPs of a traced function, counted on its jaxpr: every matrix product and convolution, loops times their length.

The compiler's own count (`cost_analysis`) takes the body of a loop once, whatever its length. Element-wise work is
not counted: next to the products it is nothing, and a count of products is what hardware peaks are quoted for.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from axon.kernels.attention import Causal, Everything, Window
from axon.kernels.attention.cost import pairs
from axon.plan.scopes import scopes

_WHOLE = ("pallas_call", "mpmd_map", "while")
"""Primitives with bodies that are not counted body by body."""


@dataclass(frozen=True)
class Count:
    """FLOPs over all devices, and a line for each thing that could not be counted and so counts as nothing."""

    flops: int = 0
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: "Count") -> "Count":
        return Count(self.flops + other.flops, tuple(dict.fromkeys(self.uncounted + other.uncounted)))

    def __mul__(self, times: int) -> "Count":
        return Count(self.flops * times, self.uncounted)


def count_flops(fn: Callable[..., Any], *args: Any) -> Count:
    """FLOPs of one call of `fn` on arguments with these shapes (arrays or `jax.ShapeDtypeStruct`)."""
    return count_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def count_jaxpr(jaxpr: core.Jaxpr) -> Count:
    """FLOPs of a jaxpr of global shapes: a multiply and an add are two."""
    return sum((count_equation(equation) for equation in jaxpr.eqns), Count())


def count_equation(equation: core.JaxprEqn) -> Count:
    """FLOPs of one equation, its bodies included."""
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        return Count(_PRODUCTS[name](equation))
    if name in ("pallas_call", "mpmd_map"):
        return _pallas(params)
    if name == "while":
        return _while(equation)
    bodies = [count_jaxpr(body) for body in bodies_of(params)]
    if name == "cond":
        return max(bodies, key=lambda count: count.flops)
    return sum(bodies, Count()) * _times(name, params)


def flops_by_module(jaxpr: core.Jaxpr, stack: str = "") -> dict[str, int]:
    """`count_jaxpr`, by the path of the module that each product is in: see `axon.plan.scopes`."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        name, where = equation.primitive.name, f"{stack}/{equation.source_info.name_stack}"
        bodies = () if name in _WHOLE or name in _PRODUCTS else tuple(bodies_of(equation.params))
        bodies = (max(bodies, key=lambda body: count_jaxpr(body).flops),) if name == "cond" else bodies
        if not bodies:
            found["/".join(scopes(where))] += count_equation(equation).flops
        for body in bodies:
            for path, flops in flops_by_module(body, where).items():
                found[path] += flops * _times(name, equation.params)
    return {path: flops for path, flops in found.items() if flops}


def flops_of_kernels(jaxpr: core.Jaxpr, prefix: str) -> int:
    """`count_jaxpr` of the Pallas kernels alone whose names begin so."""
    return sum(kernel_flops(equation, prefix) for equation in jaxpr.eqns)


def kernel_flops(equation: core.JaxprEqn, prefix: str) -> int:
    """`count_equation` of the Pallas kernels alone whose names begin so."""
    name, params = equation.primitive.name, equation.params
    if name in ("pallas_call", "mpmd_map"):
        return _pallas(params).flops * kernel_name(params).startswith(prefix)
    return sum(flops_of_kernels(body, prefix) for body in bodies_of(params)) * _times(name, params)


def kernel_name(params: dict[str, Any]) -> str:
    """The name that a Pallas call was given."""
    return params.get("name") or "(unnamed)"


def _times(name: str, params: dict[str, Any]) -> int:
    """How often the body of an equation runs: scans repeat it, and a `shard_map` has it run by each device."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        return math.prod(size for axis, size in params["mesh"].shape.items() if axis in manual)
    return 1


def bodies_of(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs inside an equation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            body = getattr(item, "jaxpr", item)  # a closed jaxpr holds its constants too
            if isinstance(body, core.Jaxpr):
                yield body


def _while(equation: core.JaxprEqn) -> Count:
    once = sum((count_jaxpr(body) for body in bodies_of(equation.params)), Count())
    if once.flops == 0:
        return once
    return Count(0, (f"a while loop runs an unknown number of times ({once.flops:,} FLOPs each time)", *once.uncounted))


def _pallas(params: dict[str, Any]) -> Count:
    """A kernel's own estimate; without one, its body for every block of its grid, of which it may skip some.

    For GPUs (`mpmd_map`) the estimate alone: a body's products are those of one of several threads.
    """
    estimate = params.get("cost_estimate")
    if estimate is not None:
        return Count(int(estimate.flops))
    name = kernel_name(params)
    if "grid_mapping" not in params:
        return Count(0, (f"the Pallas kernel {name} has no cost estimate",))
    doubt = f"the Pallas kernel {name} has no cost estimate: all blocks of its grid count, also those that it skips"
    return count_jaxpr(params["jaxpr"]) * math.prod(params["grid_mapping"].grid) + Count(0, (doubt,))


def _shapes(equation: core.JaxprEqn) -> list[tuple[int, ...]]:
    return [variable.aval.shape for variable in equation.invars[:2]]  # pyright: ignore[reportAttributeAccessIssue]


def _dot_general(equation: core.JaxprEqn) -> int:
    (_, contracted), (_, batched) = equation.params["dimension_numbers"]
    return _product(_shapes(equation), {*contracted, *batched})


def _ragged_dot_general(equation: core.JaxprEqn) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    return _product(_shapes(equation), {*contracted, *batched, *numbers.rhs_group_dimensions})


def _product(shapes: list[tuple[int, ...]], shared: set[int]) -> int:
    """Two FLOPs for each element of the left operand and each element of the right's dimensions that it lacks."""
    left, right = shapes
    return 2 * math.prod(left) * math.prod(size for axis, size in enumerate(right) if axis not in shared)


def _conv_general_dilated(equation: core.JaxprEqn) -> int:
    """For each element of the output, one product with each element of the kernel that feeds its feature."""
    _, kernel = _shapes(equation)
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    output: Any = equation.outvars[0].aval
    return 2 * math.prod(output.shape) * math.prod(kernel) // features


def _cudnn_attention(equation: core.JaxprEqn, of_keys: int, of_values: int) -> int:
    """So many products of head_dim, and of value_dim, for each pair that its own mask allows, hidden by a bias or not.

    Operands `batch seq heads head_dim`.
    """
    q, _, v = (variable.aval.shape for variable in equation.invars[:3])  # pyright: ignore[reportAttributeAccessIssue]
    window = equation.params["sliding_window_length"]
    mask = Causal() if equation.params["mask_type"].name == "CAUSAL" else Everything()
    seen = pairs(mask if window is None else mask & Window(window), q[1], v[1])
    return 2 * q[0] * q[2] * seen * (of_keys * q[3] + of_values * v[3])


_PRODUCTS: dict[str, Callable[[core.JaxprEqn], int]] = {
    "dot_product_attention_fwd_wrapper": lambda equation: _cudnn_attention(equation, 1, 1),
    "dot_product_attention_bwd_wrapper": lambda equation: _cudnn_attention(equation, 3, 2),
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _conv_general_dilated,
}
