"""From the configuration of a run to its compiled functions."""

from axon.errors import UserError
from axon.layout import Placement
from axon.run.tree import Train
from axon.train.replay import check_can_replay
from axon.train.step import Program


def program(train: Train, placement: Placement | None = None) -> Program:
    """The compiled functions of a run: `init`, `step`, `evaluate`.

    `placement`: a mesh other than that of this machine's devices: to trace the program, or to compile for.
    """
    program = Program(
        train.model,
        train.layout,
        train.optimizer,
        batch=train.data.batch,
        seq=train.seq,
        objective=train.objective,
        outer=train.outer,
        precision=train.precision,
        seed=train.seed,
        kernels=train.kernels,
        placement=placement,
        can_skip=train.faults.can_skip,
    )
    if train.faults.replay_every is not None:
        check_can_replay(train.layout)
    if train.faults.can_roll_back and program.in_flight:
        raise UserError(
            "Train.faults: a schedule without a flush, as TwoBW, has a batch in flight in each checkpoint, which a "
            "rollback could not leave out. Set Faults.not_finite (and Spikes.policy) to 'skip' or 'stop'"
        )
    return program
