"""The configuration of serving: the same object from a .gin file, a script and a notebook."""

from dataclasses import dataclass
from typing import Literal

from axon.axes import Execution
from axon.checks import check_range
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn.multi_lora import Room, room_for
from axon.precision import Precision
from axon.run.planned import Planned
from axon.run.tree import Model
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.check_layout import check_serves
from axon.serve.program import ServingProgram

OF_TRAINING = ("reduce", "parameters", "recipe", "loss_scale")
"""Fields of a precision that serving does not use."""


@dataclass(frozen=True)
class Serve:
    """A model that answers requests, as data.

    Args:
        model: what is served, as `Llama(…)`. layout: where each named axis lives. precision: dtypes of the arithmetic.
        weights: the dtype in which parameters are stored; "auto" is that of `precision.compute`, and int8,
            float8_e4m3fn, int4 and nf4 are for the blocks' matrices alone, each with scales (`axon.nn.quantized`).
        capacity: how much is done at once. draft: "mtp" where the model's own multi-token block guesses, with pages of
            its own (`axon serve --draft mtp`). adapter_rank: of the adapters that there is room for, all together
            (`axon serve --adapter-rank`). execution: how it is carried out. plan: what layout, weights and capacity
            were planned for (`axon plan --write`), with which the model and the machine are compared.
    """

    model: Model
    layout: Layout = Layout()
    precision: Precision = Precision()
    weights: Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "nf4", "mxfp4"] = "auto"
    capacity: Capacity = Capacity()
    draft: Literal["mtp"] | None = None
    adapter_rank: int = 0
    execution: Execution = Execution()
    plan: Planned | None = None

    def __post_init__(self):
        check_range(self, "[0, 2**16]", "adapter_rank")
        if tiers := self.execution.composition:
            raise UserError(
                f"Serve.execution: {tiers[0].name} is of training alone, and serving has no such tier; leave it out"
            )
        values, default = vars(self.precision), vars(Precision())
        if unused := [name for name in OF_TRAINING if values[name] != default[name]]:
            said = ", ".join(f"Precision.{name} = {values[name]!r}" for name in unused)
            raise UserError(f"Serve.precision: {said}: of training alone, and without effect on serving; leave it out")
        if self.execution.remat != "none":
            raise UserError(
                f"Serve.execution: Execution.remat = {self.execution.remat!r} is of training alone, and serving has no "
                "backward; leave it out"
            )


def serving_program(serve: Serve, placement: Placement | None = None) -> ServingProgram:
    """The steps of its engine. `placement`: a mesh other than that of this machine's devices, to compile for. Raises
    `UserError` where its plan is for another model or number of devices."""
    if serve.plan is not None:
        serve.plan.check(serve.model, {}, placement)
    placement = placement or Placement.of(serve.layout)
    compute = serve.precision.compute_dtype(placement.platform)
    dtype = compute if serve.weights == "auto" else serve.weights
    options = {"precision": serve.precision, "execution": serve.execution, "placement": placement}
    transforms = room_for(Room(serve.adapter_rank), dtype, compute)
    runtime = Runtime(serve.model, serve.layout, weights=dtype, transforms=transforms, **options)
    check_serves(runtime)
    return ServingProgram(runtime, serve.capacity, multi_token=serve.draft == "mtp")
