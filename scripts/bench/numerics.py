"""One training step on one device against the same step on the CPU in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from axon.layout import Layout
from axon.precision import Precision, Recipe
from axon.train.step import Program
from models.llama import Llama
from scripts.bench.reference import OPTIMIZER, random_batch

Compute = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Step:
    """The loss in nats, the global gradient norm, and each parameter's, of the first step."""

    loss: float
    grad_norm: float
    norms: dict[str, float]


def first_step(
    model: Llama, batch: int, seq: int, device: Any, compute: Compute, seed: int, recipe: Recipe | None = None
) -> Step:
    """The first training step on `device`; float32 with the highest precision of matrix products."""
    with jax.default_matmul_precision("highest" if compute == "float32" else "default"):
        program = Program(
            model,
            Layout(mesh={"data": 1}),
            OPTIMIZER,
            batch=batch,
            seq=seq,
            precision=Precision(compute, recipe=recipe),
            seed=seed,
            devices=[device],
        )
        placed = program.place(random_batch(seed, batch, seq, model.vocab))
        _, metrics = jax.device_get(jax.block_until_ready(program.step(program.init(), placed)))
    norms = dict(zip(program.parameters, np.sqrt(metrics["norms"]).tolist(), strict=True))
    return Step(float(metrics["loss"]), float(metrics["grad_norm"]), norms)


def difference(step: Step, reference: Step) -> dict[str, Any]:
    """Relative differences: of the loss, of the gradient norm, the largest of a parameter's norm, and its path.

    A parameter's is relative to its own norm, or to a thousandth of the global one where that is more: some true
    gradients are nearly zero.
    """
    floor = 1e-3 * reference.grad_norm
    off = {path: abs(step.norms[path] - norm) / max(norm, floor) for path, norm in reference.norms.items()}
    worst = max(off, key=lambda path: off[path])
    return {
        "loss": abs(step.loss / reference.loss - 1),
        "grad_norm": abs(step.grad_norm / reference.grad_norm - 1),
        "parameter_grad_norm": off[worst],
        "worst_parameter": worst,
    }


def judged(step: Step, reference: Step, tolerance: float) -> dict[str, Any]:
    """Their `difference`, the largest that is allowed, and if it is within that."""
    off = difference(step, reference)
    worst = max(off[name] for name in ("loss", "grad_norm", "parameter_grad_norm"))
    return off | {"tolerance": tolerance, "within": worst <= tolerance}


def difference_lines(title: str, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Findings of `judged` by name, or why one is unavailable, as lines of a table."""
    lines = [f"{title:40}{'loss':>10}{'grad norm':>12}{'a parameter':>13}{'allowed':>10}"]
    for name, one in found.items():
        if "unavailable" in one:
            lines.append(f"{name:40}  {one['unavailable']}")
            continue
        figures = (
            f"{one['loss']:10.1e}{one['grad_norm']:12.1e}{one['parameter_grad_norm']:13.1e}{one['tolerance']:10.1e}"
        )
        lines.append(f"{name:40}{figures}  {'ok' if one['within'] else 'TOO FAR: ' + one['worst_parameter']}")
    return lines
