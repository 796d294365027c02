"""XLA's options for each target: one table, each option with its reason and the figure that justified it.

`axon.train.step.Program` compiles its functions with them. A chip that is not in the table gets none. Figures: jax
0.12.0.1 with libtpu 0.0.50.1 unless they say otherwise, 2026-11-21; `docs/measurements.md` has the shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option of XLA: its name and value, why it is set, and what was measured with and without it."""

    name: str
    value: Any
    reason: str
    figure: str


def _on_sparsecores(figure: str) -> tuple[Option, ...]:
    """The options that let a chip's SparseCores do the collectives."""
    collectives = {
        "all_gather": "Gathers along one dimension of the torus run beside the TensorCore's work.",
        "2d_all_gather": "Gathers over two dimensions of the torus run beside it, too.",
        "reduce_scatter": "Reduce-scatters run beside it; over several dimensions only with the next option.",
        "nd_reduce_scatter": "Over several dimensions a reduce-scatter stays one; else an all-reduce and a slice.",
        "all_reduce": "All-reduces run beside the TensorCore's work.",
    }
    option = "xla_tpu_enable_sparse_core_collective_offload_{}"
    return tuple(Option(option.format(kind), "true", reason, figure) for kind, reason in collectives.items())


TABLE: Mapping[str, Sequence[Option]] = {
    "TPU v5": (
        Option(
            "xla_tpu_scoped_vmem_limit_kib",
            "98304",
            "Room for larger blocks of a matrix product. The program takes about five times as long to compile.",
            "Llama 3 8B on v5p:4x4x4, 128 x 8,192 tokens: matrix products 4,624 -> 3,527 Mcyc, model time 3.536 -> "
            "2.920 s; compiling 62 -> 327 s on 2 cores.",
        ),
        *_on_sparsecores(
            "Llama 3.1 8B on v5p:4x4x4, 128 x 8,192 tokens, all five: asynchronous share of the bytes 3 -> 99 %, model "
            "time 2.672 -> 2.551 s."
        ),
        Option(
            "xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all",
            "true",
            "Experts' tokens are exchanged beside the TensorCore's work; else a ragged all-to-all is synchronous.",
            "32,768 rows of 2,048, bf16, over 4 of 16 chips of v5p:2x2x4: one operation, or a SparseCore's thread.",
        ),
    ),
    "TPU v6 lite": (
        Option(
            "xla_tpu_scoped_vmem_limit_kib",
            "98304",
            "Room for larger blocks of a matrix product, as on v5p.",
            "Llama 3.1 8B on v6e:16x16, 512 x 8,192 tokens: matrix products 3,197 -> 2,181 Mcyc, model time 2.456 -> "
            "1.904 s.",
        ),
        *_on_sparsecores(
            "The same, all five: asynchronous share of the bytes 0 -> 99 %, model time 1.904 -> 1.747 s, 10.13 -> 8.50 "
            "GiB a chip."
        ),
    ),
    "TPU v5 lite": (
        Option(
            "xla_tpu_scoped_vmem_limit_kib",
            "32768",
            "Room for larger blocks of a matrix product, as on v5p.",
            "Llama 3.1 8B on v5e:4x4, 16 x 2,048 tokens, 2026-11-25: matrix products 939 -> 796 Mcyc, model time 0.930 "
            "-> 0.817 s (0.839 at 65536), 14.49 -> 14.81 GiB a chip; compiling 24 -> 43 s on 2 cores.",
        ),
        Option(
            "xla_tpu_decompose_einsum_reduce_scatter",
            "true",
            "A gradient's reduce-scatter goes round in a ring of permutes while the product that makes it is computed; "
            "without it, an all-reduce that everything waits for.",
            "Llama 3 8B on v5e:4x4, 16 x 2,048 tokens: asynchronous share of the bytes 44 -> 90 %, model time 1.398 -> "
            "1.105 s.",
        ),
        Option(
            "xla_jf_bf16_propagation",
            "false",
            "The pass sees that stored weights are only read as bfloat16, and makes such a copy of them all before the "
            "layers' loop: memory for nothing.",
            "The same: 10.56 -> 9.90 GiB a chip, model time 1.063 -> 1.057 s.",
        ),
    ),
}
"""`jax.Device.device_kind` → options; for GPUs the platform, `gpu`."""


def options(devices: Sequence[Any]) -> tuple[Option, ...]:
    """The options for a mesh of these devices, none for a CPU."""
    if not devices or devices[0].platform == "cpu":
        return ()
    kind = devices[0].device_kind if devices[0].platform == "tpu" else "gpu"
    return tuple(TABLE.get(kind, ()))


def compiler_options(devices: Sequence[Any]) -> dict[str, Any]:
    """The same as `jax.jit(compiler_options=…)` takes them."""
    return {option.name: option.value for option in options(devices)}
