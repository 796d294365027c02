"""Tokens/s of a training step on one device, in JAX and in PyTorch, at the largest batch that fits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from axon.axes import Execution
from axon.layout import Layout
from axon.observe.mfu import mfu, peak
from axon.precision import Precision, Recipe
from axon.train.step import Program
from models.llama import Llama
from scripts.bench.reference import OPTIMIZER, random_batch
from scripts.bench.timing import alternate

Figures = dict[str, Any]


def axon_speed(
    model: Llama,
    execution: Execution,
    batches: Sequence[int],
    seq: int,
    device: Any,
    rounds: int,
    recipe: Recipe | None = None,
) -> Figures:
    """`tokens_per_second` (median of `rounds`), `mfu`, `batch`, the most bytes that were in use on the device so far
    (`memory`), and what was chosen while tracing (`choices`)."""

    def attempt(batch: int) -> Figures:
        program = Program(
            model,
            Layout(mesh={"data": 1}),
            OPTIMIZER,
            batch=batch,
            seq=seq,
            precision=Precision("bfloat16", recipe=recipe),
            execution=execution,
            devices=[device],
        )
        placed = program.place(random_batch(0, batch, seq, model.vocab))
        state = [program.init()]

        def step():
            state[0], _ = jax.block_until_ready(program.step(state[0], placed))

        rate = _tokens_per_second(step, batch * seq, rounds)
        memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
        figures = {"tokens_per_second": rate, "batch": batch, "memory": memory, "choices": program.choices}
        return figures | _mfu(program, rate, device)

    return largest(batches, attempt, lambda error: "RESOURCE_EXHAUSTED" in str(error))


def torch_speed(model: Llama, batches: Sequence[int], seq: int, rounds: int) -> Figures:
    """The same of `torch.compile` with torch's own attention, on the GPU if torch sees one."""
    import torch  # pyright: ignore[reportMissingImports]

    from scripts.bench.torch_llama import TorchStep

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")

    def attempt(batch: int) -> Figures:
        torch.compiler.reset()
        step = TorchStep(model, None, OPTIMIZER, compiled=True, device=device, bfloat16=True)
        placed = step.place(random_batch(0, batch, seq, model.vocab))
        rate = _tokens_per_second(lambda: step(placed), batch * seq, rounds)
        return {"tokens_per_second": rate, "batch": batch, "device": device}

    return largest(batches, attempt, lambda error: "out of memory" in str(error))


def largest(
    batches: Iterable[int], attempt: Callable[[int], Figures], too_large: Callable[[Exception], bool]
) -> Figures:
    """`attempt` of the first of `batches` that fits in memory; the last one's error if none does."""
    *others, last = batches
    for batch in others:
        try:
            return attempt(batch)
        except RuntimeError as error:  # JAX's and torch's errors are both of this kind
            if not too_large(error):
                raise
    return attempt(last)


def _tokens_per_second(step: Callable[[], Any], tokens: int, rounds: int) -> float:
    return tokens / float(np.median(alternate({"step": step}, rounds, warmup=3)["step"]))


def _mfu(program: Program, rate: float, device: Any) -> Figures:
    flops, limit = program.flops_per_token, peak([device])
    return {"mfu": mfu(rate, flops, limit), "peak": limit.source, "flops_per_token": flops}
