"""The TPUs that every kernel is compiled for, and what they can do at most."""

from collections.abc import Mapping
from dataclasses import dataclass

from axon.observe.mfu import peak_of


@dataclass(frozen=True)
class Chip:
    """One device: JAX shows a chip of two cores as one, but for TPU7x.

    Args:
        kind: `jax.Device.device_kind`. topology: the smallest that has it, to compile for one of its devices.
        bandwidth: of its HBM, bytes/s. clock: of a core, Hz, where it follows from the peak: FLOP/s ÷ those of a cycle.
    """

    kind: str
    topology: str
    bandwidth: float
    cores: int = 1
    clock: float | None = None

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP/s."""
        return peak_of(self.kind, self.cores)

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which arithmetic and memory take equally long (Williams et al., roofline, 2009)."""
        return self.peak / self.bandwidth


CHIPS: Mapping[str, Chip] = {
    "v5e": Chip("TPU v5 lite", "v5e:2x2", 819e9, clock=1.5e9),
    "v5p": Chip("TPU v5", "v5p:2x2x1", 2765e9, cores=2, clock=1.75e9),
    "v6e": Chip("TPU v6 lite", "v6e:2x2", 1640e9, clock=1.75e9),
    "tpu7x": Chip("TPU7x", "tpu7x:2x2x1", 7380e9 / 2),
}
"""Bandwidths: Google Cloud TPU documentation, "System architecture"; TPU7x's is that of a chip of two devices."""
