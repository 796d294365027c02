"""From the configuration of a run to its compiled functions."""

from axon.layout import Placement
from axon.run.tree import Train
from axon.train.step import Program


def program(train: Train, placement: Placement | None = None) -> Program:
    """The compiled functions of a run: `init`, `step`, `evaluate`.

    `placement`: a mesh other than that of this machine's devices: to trace the program, or to compile for.
    """
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
