"""TPUs, a value each, with XLA's options for them: each option with its reason and the figure that justified it.

Sources: Google Cloud TPU documentation, "System architecture" of v4, v5e, v5p, v6e and TPU7x, whose figures are of a
chip, the bandwidth between chips that of all links in both directions; of narrow products those for which it states a
higher peak than bfloat16's; of the network a host's cards, over its chips; of the host's memory the RAM of the largest
virtual machine, likewise. Figures of options: jax 0.12.0.1 with libtpu
0.0.50.1 unless they say otherwise, 2026-11-21; `docs/measurements.md` has the shapes.
"""

from axon.chips.chip import Chip, Option


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


V4 = Chip(
    "v4",
    ("TPU v4",),
    peak=275e12,
    memory=32 * 2**30,
    bandwidth=1200e9,
    cores=2,
    clock=1.05e9,
    torus=3,
    link=50e9,
    network=6.25e9,
    topology="v4:2x2x1",
)

V5E = Chip(
    "v5e",
    ("TPU v5 lite", "TPU v5e"),
    peak=197e12,
    memory=16 * 2**30,
    bandwidth=819e9,
    clock=1.5e9,
    torus=2,
    link=50e9,
    network=3.125e9,
    host_memory=48e9,
    topology="v5e:2x2",
    splits_tiled_scatters=True,
    products=frozenset({"int8"}),
    options=(
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
)

V5P = Chip(
    "v5p",
    ("TPU v5", "TPU v5p"),
    peak=459e12,
    memory=95 * 2**30,
    bandwidth=2765e9,
    cores=2,
    clock=1.75e9,
    torus=3,
    link=100e9,
    network=6.25e9,
    host_memory=112e9,
    topology="v5p:2x2x1",
    products=frozenset({"int8"}),
    options=(
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
)

V6E = Chip(
    "v6e",
    ("TPU v6 lite", "TPU v6e"),
    peak=918e12,
    memory=32 * 2**30,
    bandwidth=1640e9,
    clock=1.75e9,
    torus=2,
    link=100e9,
    network=12.5e9,
    host_memory=180e9,
    topology="v6e:2x2",
    products=frozenset({"int8"}),
    options=(
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
)

TPU7X = Chip(
    "tpu7x",
    ("TPU7x",),
    peak=2307e12 / 2,
    memory=96 * 2**30,
    bandwidth=7380e9 / 2,
    torus=3,
    link=100e9 / 2,
    network=12.5e9 / 2,
    topology="tpu7x:2x2x1",
    products=frozenset({"fp8", "fp8 in attention"}),
)

TPUS = (V4, V5E, V5P, V6E, TPU7X)
