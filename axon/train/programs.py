"""Which program a run compiles: the plain one, one with an outer method, or 1-bit Adam's."""

from typing import Any

from axon.errors import UserError
from axon.layout import Layout
from axon.parallel.outer import DiLoCo, SlowMo
from axon.train.onebit import OneBitProgram
from axon.train.optimizer import AdamW, OneBitAdam
from axon.train.outer import OuterProgram
from axon.train.step import Program


def program(
    model: Any,
    layout: Layout,
    optimizer: AdamW | OneBitAdam,
    *,
    outer: DiLoCo | SlowMo | None = None,
    **options: Any,
) -> Program:
    """The `Program` that trains with `optimizer` and perhaps an outer method; `options` are `Program`'s own.

    Raises `UserError` for an outer method together with `OneBitAdam`, and `LayoutError` as the program does.
    """
    if isinstance(optimizer, OneBitAdam):
        if outer is not None:
            raise UserError(
                f"OneBitAdam exchanges momentum over 'replica' in every step, and {type(outer).__name__} lets replicas "
                "train apart: choose one. Set Train.outer to None, or use AdamW"
            )
        return OneBitProgram(model, layout, optimizer, **options)
    if outer is not None:
        return OuterProgram(model, layout, optimizer, outer=outer, **options)
    return Program(model, layout, optimizer, **options)
