"""Zero-bubble schedules: the backward for the weights, which nobody waits for, fills the gaps."""

from dataclasses import dataclass

from axon.parallel.pipeline.chunks import Chunks, V
from axon.parallel.pipeline.order import Writer, from_orders
from axon.parallel.pipeline.table import Action, Table, Work


@dataclass(frozen=True)
class ZeroBubbleH1:
    """1F1B with split backwards, in the memory of 1F1B's first stage (Qi et al., arXiv:2401.10241, section 2.3.1).

    Time lost `(p − 1)·(F + I − W)`, where I and W are the two parts of a backward, for m ≥ p, W ≤ F and W ≤ I: a third
    of 1F1B's if all three cost the same. Every stage keeps `min(m, p)` microbatches.
    """

    @property
    def virtual(self) -> int:
        """One chunk on each stage, always; of `Interleaved` the number can be chosen."""
        return 1

    def table(self, stages: int, microbatches: int) -> Table:
        orders = [_h1_order(stage, stages, microbatches) for stage in range(stages)]
        return from_orders(orders, microbatches, Chunks(stages))


def _h1_order(stage: int, stages: int, microbatches: int) -> list[Work]:
    """1F1B's order, with the weights' backward of a microbatch when `stage` more have had that of the inputs."""
    ahead = min(stages - stage, microbatches)
    order = [Work(Action.FORWARD, i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(Work(Action.BACKWARD_INPUT, i))
        if i >= stage:
            order.append(Work(Action.BACKWARD_WEIGHT, i - stage))
        if i + ahead < microbatches:
            order.append(Work(Action.FORWARD, i + ahead))
    behind = range(max(0, microbatches - stage), microbatches)
    return order + [Work(Action.BACKWARD_WEIGHT, i) for i in behind]


@dataclass(frozen=True)
class ZeroBubbleV:
    """Two chunks a stage, placed down and up again, and split backwards (ZB-V: Qi et al., arXiv:2401.10241, section 6;
    V-ZB of arXiv:2405.15362).

    No bubble if forward and both parts of the backward cost the same and `m ≥ 2p − 1`, as long as each stage goes on
    to the next step by itself. A step that ends for all stages at once, as one with a global gradient norm does, takes
    `(p − 1)·F/2` longer: the time until the last stage has something to do. Every stage keeps 2p chunks of
    microbatches, p microbatches in all, as much as 1F1B's first stage.
    """

    @property
    def virtual(self) -> int:
        """Two chunks on each stage, always; of `Interleaved` the number can be chosen."""
        return 2

    def table(self, stages: int, microbatches: int) -> Table:
        orders = [_v_order(stage, stages, max(microbatches, 2 * stages - 1)) for stage in range(stages)]
        return from_orders(orders, microbatches, Chunks(stages, 2, V))


def _v_order(stage: int, stages: int, microbatches: int) -> list[Work]:
    """Fill the V up to its turn; then one microbatch through each chunk in turn; drain, and the weights left."""
    order = Writer()
    order.add("F0", 2 * (stages - stage) - 1)
    order.add("F1 F0", stage)
    order.add("F1 I1 W1", stages - stage)
    order.add("F0 I0 W0 F1 I1 W1", microbatches - order.count("F0"))
    order.add("I0 W0 F1 I1 W1", microbatches - order.count("F1"))
    order.add("I0 I1", stage)
    order.add("I0 W0", stages - stage)
    order.add("W1", microbatches - order.count("W1"))
    order.add("W0", microbatches - order.count("W0"))
    return order.work
