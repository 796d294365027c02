"""The blocked cross-entropy against the naive one on CPU: memory and time."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from axon.kernels.cross_entropy import cross_entropy_and_gradients, cross_entropy_reference
from scripts.bench.timing import alternate, progress


def measure(tokens: int = 1024, embed: int = 256, vocab: int = 131072, rounds: int = 7) -> dict[str, Any]:
    """Loss and both gradients in float32, as `cross_entropy_and_gradients` and by autodiff of the formula.

    `temporaries` are bytes of the compiled programs, besides operands and results. Those are the same for
    both, the head's gradient among them (`outputs`, bytes), and not counted. `seconds` are medians of `rounds` in turn;
    `memory_ratio` and `time_ratio` are blocked ÷ naive, the latter the median of the rounds' own ratios.
    """
    rng = np.random.default_rng(0)
    operands = (
        rng.normal(size=(tokens, embed)).astype(np.float32),
        (rng.normal(size=(embed, vocab)) / embed**0.5).astype(np.float32),
        rng.integers(0, vocab, tokens, dtype=np.int32),
        np.ones(tokens, np.float32),
    )
    device = jax.devices("cpu")[0]
    arrays = [jax.device_put(x, device) for x in operands]
    programs = {"blocked": _compiled(_blocked, arrays), "naive": _compiled(_naive, arrays)}
    progress(f"timing {rounds} rounds of {', '.join(programs)}")
    steps = {name: lambda run=run: jax.block_until_ready(run(*arrays)) for name, run in programs.items()}
    seconds = alternate(steps, rounds, warmup=1)
    memory = {name: program.memory_analysis() for name, program in programs.items()}
    temporaries = {name: one.temp_size_in_bytes for name, one in memory.items()}
    return {
        "temporaries": temporaries,
        "outputs": memory["blocked"].output_size_in_bytes,
        "memory_ratio": temporaries["blocked"] / temporaries["naive"],
        "seconds": {name: float(np.median(values)) for name, values in seconds.items()},
        "time_ratio": float(np.median(seconds["blocked"] / seconds["naive"])),
        "rounds": rounds,
    }


def _blocked(x, head, targets, weights):
    sums, dx, dhead = cross_entropy_and_gradients(x, head, targets, weights)
    return sums.objective, dx, dhead


def _naive(x, head, targets, weights):
    def loss(x, head):
        return cross_entropy_reference(x, head, targets, weights)[0]

    value, (dx, dhead) = jax.value_and_grad(loss, (0, 1))(x, head)
    return value, dx, dhead


def _compiled(fn: Callable[..., Any], operands: list[Any]) -> Any:
    return jax.jit(fn).lower(*operands).compile()
