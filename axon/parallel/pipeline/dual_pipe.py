"""DualPipe-V: forwards and backwards paired, so that one's communication hides behind the other's compute."""

from dataclasses import dataclass

from axon.parallel.pipeline.chunks import Chunks, V
from axon.parallel.pipeline.order import Writer, from_orders
from axon.parallel.pipeline.table import Table, Work


@dataclass(frozen=True)
class DualPipeV:
    """DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1) cut in half into a V, by the order of its authors'
    program (github.com/deepseek-ai/DualPipe, `dualpipe/dualpipev.py`).

    Time lost `(p − 1)·(F&B + B − 3W)` on p stages (PP/2 in the authors' table), for m ≥ 2p. All costs are those of one
    chunk, of which a stage has two; B is a whole backward, and F&B a forward and a backward that run as one, after
    which the results of both are there (`Costs.pair`). So for W ≤ F ≤ B − W. In the table the two of a pair follow
    each other: run one after the other, they pass on the forward's result at once, and if all parts cost the same only
    half as much time is lost. A stage keeps up to 2p + 1 pairs of microbatch and chunk.
    """

    @property
    def virtual(self) -> int:
        """Two chunks on each stage, always; of `Interleaved` the number can be chosen."""
        return 2

    def table(self, stages: int, microbatches: int) -> Table:
        orders = [_order(stage, stages, max(microbatches, 2 * stages)) for stage in range(stages)]
        return from_orders(orders, microbatches, Chunks(stages, 2, V))


def _order(stage: int, stages: int, microbatches: int) -> list[Work]:
    """Fill the V; turn with split backwards; pairs; drain, and in its second half split again to drain faster."""
    after = stages - 1 - stage
    order = Writer()
    order.add("F0", 2 * after)
    order.add("F0 F1", stage + 1)
    order.add("I1 W F1", after)
    order.add("F0 B1 F1 B0", microbatches - 2 * stages + stage + 1)
    order.add("B1 F1 B0", after)
    whole, rest = divmod(stage + 1, 2)
    order.add("B1 B0", whole)
    order.add("B1 I0", rest)
    order.add("I1 I0", whole)
    order.add("W I0", after)
    order.add("W", stage + 1)
    return order.work
