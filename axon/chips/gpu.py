"""GPUs, a value each.

Sources: of peaks the maker's data sheet of each product, its figures "with sparsity" halved. Of memory and bandwidth
XLA's own description of the device (`xla/backends/gpu/target_config/specs`), which says what a program can have; where
it has none, the data sheet, whose GB are 10^9 bytes. Of an MI300X's 8-bit products int8 alone is listed: its floats are
e4m3fnuz and e5m2fnuz, other numbers than those here. Of links the data sheet's bandwidth to the GPUs of a host, halved
for one direction; of the network one card of the maker's system of 8 (DGX A100: 200 Gbit/s, the others 400) for each;
of the host's memory that system's 2 TB (DGX A100 of 80 GB, H100, H200) for 8.
"""

from dataclasses import replace

from axon.chips.chip import Chip

AMPERE = (
    "core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 l2_cache_size: 41943040 shared_memory_per_core: 167936 "
    "shared_memory_per_block_optin: 166912 cuda_compute_capability { major: 8 feature_extension: NONE }"
)
HOPPER = (
    "core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800 shared_memory_per_core: 233472 "
    "shared_memory_per_block_optin: 232448 "
    "cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }"
)


INT8 = frozenset({"int8"})
BOTH = frozenset({"int8", "fp8"})
TILED = BOTH | {"fp8 in blocks of 128"}
"""Products of Hopper: those of blocks are our own kernel's (docs/kernels/quantized_matmul.md)."""


def _described(
    name: str, kind: str, peak: float, memory: int, bandwidth: float, multiprocessors: str, products: frozenset[str]
) -> Chip:
    """A GPU that programs can be compiled for without one, by XLA's description of it, a `GpuTargetConfig`."""
    target = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
  {multiprocessors}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 20 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""
    chip = Chip(name, (kind,), peak, memory, bandwidth, topology=f"{name}:1", target=target, products=products)
    return replace(chip, host_memory=2e12 / 8)


def _on_sheet(name: str, kind: str, peak: float, memory: float, bandwidth: float, products: frozenset[str]) -> Chip:
    return Chip(name, (kind,), peak, int(memory), bandwidth, products=products)


def _linked(chip: Chip, link: float, network: float) -> Chip:
    return replace(chip, link=link, network=network)


GPUS = (
    _linked(_described("a100", "NVIDIA A100-SXM4-80GB", 312e12, 85100068864, 2.03904e12, AMPERE, INT8), 300e9, 25e9),
    _linked(_described("h100", "NVIDIA H100 80GB HBM3", 989.4e12, 84942979072, 3.35232e12, HOPPER, TILED), 450e9, 50e9),
    _linked(_described("h200", "NVIDIA H200", 989.4e12, 151397597184, 4.8e12, HOPPER, TILED), 450e9, 50e9),
    _linked(_on_sheet("h800", "NVIDIA H800", 989.4e12, 80e9, 3.35e12, TILED), 200e9, 50e9),
    _linked(_on_sheet("a100-40gb", "NVIDIA A100-SXM4-40GB", 312e12, 42331013120, 1.5552e12, INT8), 300e9, 25e9),
    _on_sheet("a100-pcie", "NVIDIA A100 80GB PCIe", 312e12, 79050250240, 1.935e12, INT8),
    _on_sheet("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", 312e12, 40e9, 1.555e12, INT8),
    _on_sheet("l4", "NVIDIA L4", 121e12, 24e9, 300e9, BOTH),
    _on_sheet("l40s", "NVIDIA L40S", 362e12, 48e9, 864e9, BOTH),
    _on_sheet("h100-pcie", "NVIDIA H100 PCIe", 756e12, 84942979072, 2.03904e12, TILED),
    _on_sheet("h100-nvl", "NVIDIA H100 NVL", 835.5e12, 94e9, 3.9e12, TILED),
    _on_sheet("h200-nvl", "NVIDIA H200 NVL", 835.5e12, 141e9, 4.8e12, TILED),
    _on_sheet("gh200", "NVIDIA GH200 480GB", 989.4e12, 96e9, 4e12, TILED),
    _linked(_on_sheet("b200", "NVIDIA B200", 2250e12, 191514411008, 7.67232e12, BOTH), 900e9, 50e9),
    _on_sheet("gb200", "NVIDIA GB200", 2500e12, 197897748480, 7.928064e12, BOTH),
    _linked(_on_sheet("mi300x", "AMD Instinct MI300X", 1307.4e12, 192 * 2**30, 5.3e12, INT8), 448e9, 50e9),
)
