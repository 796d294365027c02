"""From the configuration of a run to its compiled functions."""

from collections.abc import Sequence
from typing import Any

from axon.layout import Placement
from axon.run.serving import Serve
from axon.run.tree import Train
from axon.train.step import Program


def program(train: Train, placement: Placement | None = None) -> Program:
    """The compiled functions of a run: `init`, `step`, `evaluate`.

    `placement`: a mesh other than that of this machine's devices: to trace the program, or to compile for. Raises
    `UserError` where the run's plan is for another model, batch or number of devices.
    """
    if train.plan is not None:
        train.plan.check(train.model, {"Data.batch": train.data.batch, "Data.seq": train.seq}, placement)
    return Program(
        train.model,
        train.layout,
        train.optimizer,
        batch=train.data.batch,
        seq=train.seq,
        objective=train.objective,
        outer=train.outer,
        precision=train.precision,
        seed=train.seed,
        execution=train.execution,
        placement=placement,
        faults=train.faults,
        transforms=train.transforms,
        references=train.reference_models,
        data_references=train.data_references,
    )


def placed(tree: Train | Serve, devices: Sequence[Any]) -> Placement:
    """The mesh of a run, or of engines, on `devices`. Raises `UserError` where its plan is for another number."""
    return tree.plan.placement(tree.layout, devices) if tree.plan else Placement.of(tree.layout, devices)
