"""How long the Pallas kernels of a training step take on a TPU: attention, and the products of experts.

Each runs at what the matrix units sustain or at what its recorded bundles allow, the slower of the two (see
`axon.plan.bundles`), forward and backward apart. Elsewhere they run at the rate of all products.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from axon.chips import KERNEL_CHIPS
from axon.chips.chip import Chip
from axon.kernels.grouped_matmul.tiling import DEPTH
from axon.plan.bundles import flops_per_cycle

FORWARD, BACKWARD = "axon_attention_forward", "axon_attention_backward"
PRODUCT, OF_ROWS, OF_WEIGHTS = "grouped_matmul", "grouped_matmul_transposed", "grouped_matmul_weight_gradient"

FLASH_BACKWARD, BACKWARD_PRODUCTS = 5 / 2, 2.0
"""FLOPs of attention's backward ÷ the forward's: five products to two in our kernel, which computes the scores again;
and as a model counts them."""


class ExpertsWork(NamedTuple):
    """Products of a period's experts on a device: forward FLOPs, rows in all, experts (of each matrix) and the bytes of
    their weights as they are multiplied."""

    flops: float
    rows: float
    groups: float
    bytes: float

    def of(self, tokens: float) -> "ExpertsWork":
        """Of so many tokens, where these are of one."""
        return self._replace(flops=tokens * self.flops, rows=tokens * self.rows)


@dataclass(frozen=True)
class Kernels:
    """FLOP/s of kernels on a device."""

    chip: Chip

    @cached_property
    def rates(self) -> dict[str, float]:
        """Call → FLOP/s that it reaches; of a chip without recorded bundles nothing."""
        if self.chip.name not in KERNEL_CHIPS or self.chip.clock is None:
            return {}
        clock = self.chip.clock
        return {call: min(self.rate, one * clock) for call, one in flops_per_cycle(self.chip.name).items()}

    @property
    def rate(self) -> float:
        """FLOP/s that products reach."""
        return self.chip.peak * self.chip.sustained

    def attention(self, flops: float) -> tuple[float, float]:
        """Seconds of attention's forward, of `flops`, and of its backward."""
        backward = FLASH_BACKWARD if BACKWARD in self.rates else BACKWARD_PRODUCTS
        return flops / self.rates.get(FORWARD, self.rate), backward * flops / self.rates.get(BACKWARD, self.rate)

    def experts(self, work: ExpertsWork) -> tuple[float, float]:
        """Seconds of the experts' forward, and of its backward: for the rows, and for the weights."""
        forward, of_rows, of_weights = (self._grouped(work, call) for call in (PRODUCT, OF_ROWS, OF_WEIGHTS))
        return forward, of_rows + of_weights

    def _grouped(self, work: ExpertsWork, call: str) -> float:
        """Seconds of one product of each row, or as long as the weights take to come. A group's rows begin and end in
        a part of a piece: half of what the matrix unit contracts at once is multiplied in vain at either end."""
        if call not in self.rates:
            return work.flops / self.rate
        whole = work.flops * (1 + DEPTH * work.groups / work.rows) if work.rows else 0.0
        return max(whole / self.rates[call], work.bytes / self.chip.bandwidth)
