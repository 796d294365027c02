"""`axon bench train`: tokens/s of one training step on CPU, against PyTorch doing the same work."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from axon.layout import Layout
from axon.train.optimizers import AdamW
from axon.train.step import Program
from models.llama import Llama
from scripts.bench import reference
from scripts.bench.timing import alternate, progress

COMPARED = 3
"""Steps whose losses are compared before any is timed."""

Losses = Callable[[dict[str, np.ndarray]], float]


def run(
    model: Llama = reference.MODEL,
    batch: int = reference.BATCH,
    seq: int = reference.SEQ,
    optimizer: AdamW = reference.OPTIMIZER,
    rounds: int = 9,
) -> dict[str, Any]:
    """Tokens/s of `axon`, `torch_eager` and `torch_compile`, medians of `rounds` steps in turn.

    All start from the same parameters, on the same batches, one document a sequence. `loss_difference`: the largest
    relative difference of their first losses. `ratio` is axon ÷ torch_compile: the median of the rounds' own ratios;
    `spread` its quartiles. Without torch its figures are None.
    """
    program = Program(model, Layout(mesh={"data": 1}), optimizer, batch=batch, seq=seq, devices=jax.devices("cpu")[:1])
    steps = _torch_steps(program, model, optimizer) | {"axon": _axon_step(program)}
    difference = _compare(steps, [reference.random_batch(i, batch, seq, model.vocab) for i in range(COMPARED)])
    timed = reference.random_batch(COMPARED, batch, seq, model.vocab)
    progress(f"timing {rounds} rounds of {', '.join(steps)}")
    seconds = alternate({name: lambda step=step: step(timed) for name, step in steps.items()}, rounds)
    speed = {name: batch * seq / float(np.median(values)) for name, values in seconds.items()}
    ratios = seconds["torch_compile"] / seconds["axon"] if "torch_compile" in seconds else None
    return {
        "axon": speed["axon"],
        "torch_eager": speed.get("torch_eager"),
        "torch_compile": speed.get("torch_compile"),
        "ratio": None if ratios is None else float(np.median(ratios)),
        "spread": None if ratios is None else [float(q) for q in np.quantile(ratios, (0.25, 0.75))],
        "loss_difference": difference,
        "rounds": rounds,
        "threads": _threads(),
        "tokens_per_step": batch * seq,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    shown = [("axon", f"{result['axon']:,.0f} tokens/s")]
    if result["torch_compile"] is None:
        missing = "not installed: pip install torch==2.13.0 (its CPU build is for Python 3.11)"
        return [*shown, ("torch", missing)]
    low, high = result["spread"]
    return [
        *shown,
        ("torch eager", f"{result['torch_eager']:,.0f} tokens/s"),
        ("torch.compile", f"{result['torch_compile']:,.0f} tokens/s"),
        ("axon ÷ torch.compile", f"{result['ratio']:.2f} (half of the rounds: {low:.2f} to {high:.2f})"),
        ("first losses differ by", f"{result['loss_difference']:.1e}"),
        ("threads", str(result["threads"])),
    ]


def _axon_step(program: Program) -> Losses:
    state = [program.init()]

    def step(batch):
        state[0], metrics = program.step(state[0], program.place(batch))
        jax.block_until_ready(state[0])
        return float(metrics["loss"])

    return step


def _torch_steps(program: Program, model: Llama, optimizer: AdamW) -> dict[str, Losses]:
    if find_spec("torch") is None:
        return {}
    import torch  # pyright: ignore[reportMissingImports]

    from scripts.bench.torch_llama import TorchStep

    torch.set_num_threads(_threads())
    parameters = program.init().parameters

    def losses(compiled: bool) -> Losses:
        step = TorchStep(model, parameters, optimizer, compiled=compiled)
        return lambda batch: step(step.place(batch))

    return {"torch_eager": losses(compiled=False), "torch_compile": losses(compiled=True)}


def _compare(steps: dict[str, Losses], batches: list[dict[str, np.ndarray]]) -> float | None:
    """Largest relative difference between the losses of Axon's and any other's steps on these batches."""
    losses = {}
    for name, step in steps.items():
        progress(f"first steps of {name}")
        losses[name] = np.array([step(batch) for batch in batches])
    own = losses.pop("axon")
    return max((float(np.max(np.abs(other / own - 1))) for other in losses.values()), default=None)


def _threads() -> int:
    """The CPUs that this process may use, which is how many threads XLA takes."""
    return len(os.sched_getaffinity(0))
