"""1-bit Adam's configuration."""

from dataclasses import dataclass

from axon.checks import check_range
from axon.composition import ONE_BIT, REPLICAS, STAGES, Part
from axon.errors import UserError
from axon.train.optimizers.schedule import AnySchedule


@dataclass(frozen=True)
class OneBitAdam:
    """1-bit Adam (Tang et al., arXiv:2102.02888) over the mesh axis `replica`.

    For `warmup` steps it is `AdamW`. Then the variance is frozen, each replica adds its own gradient to the common
    momentum, and these momenta are averaged over replicas as signs, with error feedback: see
    `axon.parallel.onebit`. Within a replica nothing is compressed.

    Args:
        schedule: the learning rate. warmup: steps of plain Adam, until the variance is stable: 15 to 25 % of a run in
            the paper. b1, b2, eps, weight_decay: AdamW's. clip: largest global norm of the gradients; after the
            warm-up, of each replica's own. None leaves them.
    """

    schedule: AnySchedule
    warmup: int
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        stages = {STAGES: "replicas update by themselves, which a pipeline's stages cannot do yet"}
        return (Part("Train.optimizer = OneBitAdam", "use AdamW", frozenset({REPLICAS, ONE_BIT}), stages),)

    def __post_init__(self):
        if self.warmup < 1:
            raise UserError(
                f"OneBitAdam.warmup is {self.warmup}: without a step of plain Adam there is no variance to freeze; "
                "must be at least 1"
            )
        check_range(self, "[0, 1)", "b1", "b2")
        check_range(self, "[0, inf)", "weight_decay")
        check_range(self, "(0, inf)", "eps", "clip")
