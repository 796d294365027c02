"""`axon bench plan`: seconds of a step as planned and as they are, of eight layouts on 8 CPU devices."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from scipy.stats import kendalltau

from axon.axes import Execution
from axon.chips.target import Target
from axon.errors import UserError
from axon.launch.host import keep_freed_memory
from axon.layout import Layout, Placement
from axon.plan.predict.seconds import seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.plan.this_cpu import CPU, this_cpu
from axon.train.step import Program
from models.llama import Llama
from scripts.bench import reference
from scripts.bench.timing import alternate, progress

DEVICES = 8
MODEL = Llama(vocab=8192, embed=256, layers=4, heads=8, kv_heads=8, mlp=1024)
BATCH, SEQ = 32, 256
STREAM = {"seq.residual": ("context", "tensor")}
LAYOUTS = {
    "data 8": (Layout({"data": 8}, zero=0), "none"),
    "data 8, ZeRO-3": (Layout({"data": 8}, zero=3), "none"),
    "data 8, remat": (Layout({"data": 8}, zero=0), "full"),
    "data 8, ZeRO-3, 4 microbatches": (Layout({"data": 8}, zero=3, microbatches=4), "none"),
    "data 4 × tensor 2": (Layout({"data": 4, "tensor": 2}, zero=0), "none"),
    "data 2 × tensor 4": (Layout({"data": 2, "tensor": 4}, zero=0), "none"),
    "tensor 8": (Layout({"tensor": 8}, zero=0), "none"),
    "tensor 8, seq, remat": (Layout({"tensor": 8}, STREAM, zero=0), "full"),
}


def run(model: Llama = MODEL, batch: int = BATCH, seq: int = SEQ, rounds: int = 7) -> dict[str, Any]:
    """`tau`: Kendall's τ of predicted and measured seconds of a step; `predicted` and `measured`: these, by layout.

    Measured is the median of `rounds` in which the layouts take turns.
    """
    _have_devices()
    target = Target(f"{CPU}:{DEVICES}", this_cpu(DEVICES), (1, DEVICES))
    steps, predicted = {}, {}
    for name, (layout, remat) in LAYOUTS.items():
        progress(f"compiling: {name}")
        program = _program(model, layout, remat, batch, seq)
        predicted[name] = _predicted(model, program, target)
        steps[name] = _stepper(program, reference.random_batch(0, batch, seq, model.vocab))
    progress(f"timing {rounds} rounds")
    measured = {name: float(np.median(times)) for name, times in alternate(steps, rounds).items()}
    tau = _tau([predicted[name] for name in LAYOUTS], [measured[name] for name in LAYOUTS])
    return {"tau": tau, "predicted": predicted, "measured": measured}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    predicted, measured = result["predicted"], result["measured"]
    names = sorted(measured, key=lambda name: measured[name])
    figures = [(name, f"{1e3 * measured[name]:.0f} ms, predicted {1e3 * predicted[name]:.0f}") for name in names]
    return [*figures, ("Kendall's τ", f"{result['tau']:.2f}")]


def _program(model: Llama, layout: Layout, remat: str, batch: int, seq: int, **mesh: Any) -> Program:
    execution = Execution(remat=remat)
    mesh = mesh or {"devices": jax.devices(CPU)[:DEVICES]}
    return Program(model, layout, reference.OPTIMIZER, batch=batch, seq=seq, execution=execution, **mesh)


def _predicted(model: Llama, program: Program, target: Target) -> float:
    alone = Layout({"data": 1})
    whole = _program(model, alone, "none", program.batch, program.seq, placement=Placement.described(alone, 1, CPU))
    layout, execution = program.placement.layout, program.runtime.execution
    work = Work.of(whole)
    split = Split(work, Placement.described(layout, DEVICES, CPU))
    return seconds(Shards(split, layout, execution), target).total


def _tau(these: list[float], those: list[float]) -> float:
    """Kendall's τ of two orders: 1 where all pairs are in the same order in both, −1 where none is."""
    found: Any = kendalltau(these, those)
    return float(found.statistic)


def _stepper(program: Program, batch: Any) -> Callable[[], object]:
    state, placed = [program.init()], program.place(batch)

    def step() -> None:
        state[0], metrics = program.step(state[0], placed)
        jax.block_until_ready((state[0], metrics))

    return step


def _have_devices() -> None:
    with suppress(RuntimeError):  # JAX has its devices already
        jax.config.update("jax_num_cpu_devices", DEVICES)
        keep_freed_memory()
    if len(jax.devices(CPU)) < DEVICES:
        raise UserError(f"axon bench plan needs {DEVICES} devices, and JAX has {len(jax.devices(CPU))} here")
