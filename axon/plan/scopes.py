"""An operation's modules, by its name stack in a traced program or its `op_name` in a compiled one."""

import re

from axon.parallel.pipeline.execute import BACKWARD_TICK, FORWARD_TICK

_WRAPPED = re.compile(r"(\w+)\((.*)\)")
_TRACED = ("jit", "pjit")
"""Wrappers of a function's name, which is no scope."""

_JAX = re.compile(
    r"while|body|cond|scan|closed_call|core_call|shard_map|checkpoint|remat2?|rematted_computation|eval_jaxpr|"
    r"custom_[jv][jv]p_call\w*|branch_\d+_fun|pallas_call|mpmd_map|"
)
"""What JAX adds to the names of its own accord."""


_TICKS = (FORWARD_TICK, BACKWARD_TICK)
"""Scopes that are a phase, and no module."""


def scopes(stack: str) -> tuple[str, ...]:
    """The named scopes of a name stack, the outermost first: attention, norm of `transpose(jvp(attention))/norm`.

    A scope that is entered twice in a row, as a backward does with its forward's, is there once.
    """
    found: list[str] = []
    for piece in stack.split("/"):
        name = _unwrapped(piece)
        if name and found[-1:] != [name]:
            found.append(name)
    return tuple(found)


def module_path(op_name: str) -> str:
    """The scopes of a compiled operation's `op_name`, whose last part is the operation: "attention/norm", or ""."""
    return "/".join(scopes(op_name.rpartition("/")[0]))


def _unwrapped(piece: str) -> str:
    """A scope's name without the transformations around it; "" where there is none."""
    while wrapped := _WRAPPED.fullmatch(piece):
        if wrapped[1] in _TRACED:
            return ""
        piece = wrapped[2]
    return "" if _JAX.fullmatch(piece) or piece in _TICKS else piece
