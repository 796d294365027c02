"""`axon bench train`: tokens/s of one training step on CPU, against PyTorch doing the same work."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from axon.launch.host import multiplies_bfloat16
from axon.layout import Layout
from axon.precision import Precision
from axon.train.optimizers import AdamW
from axon.train.step import Program
from models.llama import Llama
from scripts.bench import reference
from scripts.bench.timing import alternate, progress

COMPARED = 3
"""Steps whose losses are compared before any is timed."""

BFLOAT16 = "_bfloat16"
"""The end of the names of steps whose matrix products are in bfloat16."""

Losses = Callable[[dict[str, np.ndarray]], float]


def run(
    model: Llama = reference.MODEL,
    batch: int = reference.BATCH,
    seq: int = reference.SEQ,
    optimizer: AdamW = reference.OPTIMIZER,
    rounds: int = 9,
    bfloat16: bool = multiplies_bfloat16(),
) -> dict[str, Any]:
    """Tokens/s of `axon`, `torch_eager` and `torch_compile`, medians of `rounds` steps in turn, in float32; with
    `bfloat16`, by default where this machine's cores multiply it, of `axon_bfloat16` and `torch_compile_bfloat16`
    (autocast) too.

    All start from the same parameters, on the same batches, one document a sequence. `loss_difference`: the largest
    relative difference of their first losses, in float32; `loss_difference_bfloat16`: that of those in bfloat16 from
    axon's in float32. `ratio` is axon ÷ torch_compile: the median of the rounds' own ratios; `spread` its quartiles.
    Without torch its figures are None.
    """
    computed = {"": Precision(), **({BFLOAT16: Precision("bfloat16")} if bfloat16 else {})}
    programs = {end: _program(model, optimizer, batch, seq, precision) for end, precision in computed.items()}
    steps = _torch_steps(programs[""], model, optimizer, bfloat16)
    steps |= {f"axon{end}": _axon_step(program) for end, program in programs.items()}
    differences = _compare(steps, [reference.random_batch(i, batch, seq, model.vocab) for i in range(COMPARED)])
    timed = reference.random_batch(COMPARED, batch, seq, model.vocab)
    progress(f"timing {rounds} rounds of {', '.join(steps)}")
    seconds = alternate({name: lambda step=step: step(timed) for name, step in steps.items()}, rounds)
    speed = dict.fromkeys(("torch_eager", "torch_compile"))
    speed |= {name: batch * seq / float(np.median(values)) for name, values in seconds.items()}
    ratios = {key: value for end in programs for key, value in _ratios(seconds, end).items()}
    return {
        **speed,
        **ratios,
        **differences,
        "rounds": rounds,
        "threads": _threads(),
        "tokens_per_step": batch * seq,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    names = {"axon": "axon", "torch_eager": "torch eager", "torch_compile": "torch.compile"}
    names |= {f"{name}{BFLOAT16}": f"{text}, bfloat16" for name, text in names.items()}
    shown = [(text, f"{result[name]:,.0f} tokens/s") for name, text in names.items() if result.get(name) is not None]
    if f"axon{BFLOAT16}" not in result:
        shown.append(("bfloat16", "not timed: these cores do not multiply it (AMX)"))
    if result["torch_compile"] is None:
        missing = "not installed: pip install torch==2.13.0 (its CPU build is for Python 3.11)"
        return [*shown, ("torch", missing)]
    for end, text in (("", ""), (BFLOAT16, ", bfloat16")):
        if f"ratio{end}" in result:
            (low, high), ratio = result[f"spread{end}"], result[f"ratio{end}"]
            shown += [
                (f"axon ÷ torch.compile{text}", f"{ratio:.2f} (half of the rounds: {low:.2f} to {high:.2f})"),
                (f"first losses differ by{text}", f"{result[f'loss_difference{end}']:.1e}"),
            ]
    return [*shown, ("threads", str(result["threads"]))]


def _program(model: Llama, optimizer: AdamW, batch: int, seq: int, precision: Precision) -> Program:
    one, devices = Layout(mesh={"data": 1}), jax.devices("cpu")[:1]
    return Program(model, one, optimizer, batch=batch, seq=seq, devices=devices, precision=precision)


def _ratios(seconds: Mapping[str, np.ndarray], end: str) -> dict[str, Any]:
    """`ratio` and `spread` of the steps whose names have this end; None without torch."""
    if f"torch_compile{end}" not in seconds:
        return {f"ratio{end}": None, f"spread{end}": None}
    ratios = seconds[f"torch_compile{end}"] / seconds[f"axon{end}"]
    quartiles = [float(q) for q in np.quantile(ratios, (0.25, 0.75))]
    return {f"ratio{end}": float(np.median(ratios)), f"spread{end}": quartiles}


def _axon_step(program: Program) -> Losses:
    state = [program.init()]

    def step(batch):
        state[0], metrics = program.step(state[0], program.place(batch))
        jax.block_until_ready(state[0])
        return float(metrics["loss"])

    return step


def _torch_steps(program: Program, model: Llama, optimizer: AdamW, bfloat16: bool) -> dict[str, Losses]:
    if find_spec("torch") is None:
        return {}
    import torch  # pyright: ignore[reportMissingImports]

    from scripts.bench.torch_llama import TorchStep

    torch.set_num_threads(_threads())
    parameters = program.init().parameters

    def losses(compiled: bool, bfloat16: bool = False) -> Losses:
        step = TorchStep(model, parameters, optimizer, compiled=compiled, bfloat16=bfloat16)
        return lambda batch: step(step.place(batch))

    steps = {"torch_eager": losses(compiled=False), "torch_compile": losses(compiled=True)}
    return steps | ({f"torch_compile{BFLOAT16}": losses(compiled=True, bfloat16=True)} if bfloat16 else {})


def _compare(steps: dict[str, Losses], batches: list[dict[str, np.ndarray]]) -> dict[str, float | None]:
    """The largest relative differences of first losses from those of Axon's in float32: `loss_difference` of the steps
    in float32, and with an end of the name those in bfloat16."""
    losses = {}
    for name, step in steps.items():
        progress(f"first steps of {name}")
        losses[name] = np.array([step(batch) for batch in batches])
    own = losses.pop("axon")
    apart: dict[str, float | None] = {"loss_difference": None}
    for name, other in losses.items():
        key = f"loss_difference{BFLOAT16 if name.endswith(BFLOAT16) else ''}"
        apart[key] = max(apart.get(key) or 0.0, float(np.max(np.abs(other / own - 1))))
    return apart


def _threads() -> int:
    """The CPUs that this process may use, which is how many threads XLA takes."""
    return len(os.sched_getaffinity(0))
