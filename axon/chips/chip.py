"""The facts of a chip, as a value."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option of XLA: its name and value, why it is set, and what was measured with and without it."""

    name: str
    value: Any
    reason: str
    figure: str


@dataclass(frozen=True)
class Chip:
    """A device as JAX shows it, at most: a TPU of two cores is one device, but for TPU7x, of which each core is one.

    Args:
        name: as topologies are called. kinds: what `jax.Device.device_kind` calls it.
        peak: dense bf16 FLOP/s, without sparsity. memory: bytes. bandwidth: of the memory, bytes/s.
        cores: TensorCores of a TPU. clock: of a core, Hz, where it follows from the peak: FLOP/s ÷ those of a cycle.
        torus: how many dimensions the links between chips have; 0 where they are no torus.
        link: bytes/s in one direction: of one link of the torus, of which each dimension has two; without a torus, of
            one device to all others of its host. None where it is not known.
        network: bytes/s of one device to other hosts, or other slices of TPUs; None where it is not known.
        host: how many devices are linked so; of a torus, those of a slice are.
        host_memory: bytes of the host's memory for each of its devices; None where it is not known.
        sustained: how much of the peak a training step's products reach: the one constant that `axon plan` fits
            (docs/planner.md).
        topology: the smallest that has it, to compile for one of its devices; empty where none can be described.
        target: of a GPU, XLA's `GpuTargetConfig` as text.
        splits_tiled_scatters: whether its compiler takes a reduce-scatter by a dimension of which each device keeps a
            part apart, and overlaps it with the product before it.
        products: of which narrow numbers, faster than of bfloat16: "int8", "fp8" (e4m3fn and e5m2), "fp8 in blocks of
            128", "fp8 in attention" (by our kernel).
        options: of XLA, with which `axon.runtime` compiles; none where none have been measured.
    """

    name: str
    kinds: tuple[str, ...]
    peak: float
    memory: int
    bandwidth: float
    cores: int = 1
    clock: float | None = None
    torus: int = 0
    link: float | None = None
    network: float | None = None
    host: int = 8
    host_memory: float | None = None
    sustained: float = 0.7
    topology: str = ""
    target: str = ""
    splits_tiled_scatters: bool = False
    products: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which arithmetic and memory take equally long (Williams et al., roofline, 2009)."""
        return self.peak / self.bandwidth
