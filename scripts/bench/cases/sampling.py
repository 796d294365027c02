"""The search's Pallas kernel at the shapes of serving: the vocabularies of Llama 3, Gemma and GPT-2."""

import jax
import jax.numpy as jnp

from axon.kernels.cost import Cost
from axon.kernels.sampling.rules import Rules
from axon.kernels.sampling.search import STEPS
from axon.kernels.sampling.tpu import least_kept_tpu
from scripts.bench.case import Case, Part

SHAPES = (("Llama 3", 64, 128256), ("Gemma, one request", 1, 262144), ("GPT-2, neither divides", 13, 50257))


def cases() -> list[Case]:
    """Configurations to compile, with the cost of top-k and top-p together."""
    return [_case(name, batch, vocab) for name, batch, vocab in SHAPES]


def _case(name: str, batch: int, vocab: int) -> Case:
    def least(logits, temperature, top_k, top_p):
        return least_kept_tpu(logits, Rules.of(logits, temperature, top_k, top_p, None))

    row = jax.ShapeDtypeStruct((batch,), jnp.float32)
    operands = (
        jax.ShapeDtypeStruct((batch, vocab), jnp.float32),
        row,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        row,
    )
    return Case("sampling", f"{name}, {batch} × {vocab}", least, operands, cost(batch, vocab))


def cost(batch: int, vocab: int) -> Cost:
    """A compare, a select and an addition per step and logit, in two searches; six to make a power. Logits read once,
    and once more outside for the largest."""
    return Cost(flops=batch * vocab * (2 * STEPS * 3 + 6), bytes=2 * batch * vocab * 4)


def parts() -> list[Part]:
    """A step of the search over 64 rows of Llama 3's vocabulary."""
    case = cases()[0]
    return [Part("sampling", "step of the search", "sampling", case.function, case.operands)]
