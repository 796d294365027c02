"""The numerics contract, as the suites of this folder hold layouts to it.

A model is trained for some steps on one device, and on a layout from the same values with the same batches: gradients,
losses, what the routers report and what a model's variables become are the same, but for rounding.
"""

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from mechanisms import HostLayout

from axon.layout import KINDS, Execution, Layout
from axon.nn import router
from axon.nn.weight_transform import WeightTransform
from axon.precision import Precision
from axon.runtime import flattened, nested
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program

ONE = Layout({"data": 1})
ADAMW = AdamW(Constant(1e-3), eps=1e-4, clip=None)
"""Of gradients near 0 a smaller eps would step along their rounding."""

MARGIN = 1e-5
"""By how much a token's last expert must score above the next for rounding not to change its choice."""


@dataclass(frozen=True)
class Problem:
    """What is trained. `microbatches`: of the layout of one device. `tolerance`: of gradients and metrics, more where
    a rounding error may round an operand to its other neighbour in 8 bits; `subtracted`: name of a metric that is a
    difference → the size of what is subtracted."""

    model: Any
    objective: Any = NextToken()
    optimizer: Any = ADAMW
    sequences: int = 16
    seq: int = 32
    steps: int = 10
    microbatches: int = 1
    execution: Execution = Execution()
    precision: Precision = Precision()
    tolerance: float = 1e-5
    subtracted: Mapping[str, float] = field(default_factory=dict)
    transforms: tuple[WeightTransform, ...] = ()
    references: Mapping[str, Any] = field(default_factory=dict)

    def program(self, layout: Layout, seed: int = 0) -> Program:
        """The step on a layout's devices."""
        program = Program(
            self.model,
            layout,
            self.optimizer,
            batch=self.sequences,
            seq=self.seq,
            objective=self.objective,
            seed=seed,
            execution=replace(self.execution, host=layout.host if isinstance(layout, HostLayout) else ()),
            devices=devices(layout),
            precision=self.precision,
            transforms=self.transforms,
            references=self.references,
        )
        for name, runtime in program.references.runtimes.items():
            program.references.give(name, *runtime.initialise(seed + 1))
        return program

    @property
    def recorded_tolerance(self) -> float:
        """Of variables; of largest magnitudes that a recipe records, a step of the coarsest of its formats: by a
        rounding error a number may be rounded to the next."""
        recipe = self.precision.recipe
        if recipe is None or not recipe.recorded_steps:
            return 10 * self.tolerance
        return max(float(jnp.finfo(form.dtype).eps) for form in recipe.products.formats)

    def batches(self, rng: np.random.Generator, packed_batch: Callable[..., Any]) -> list[Any]:
        return [packed_batch(rng, self.sequences, self.seq, self.model.vocab) for _ in range(self.steps)]


@dataclass(frozen=True)
class Trained:
    """What some steps made: the gradients of the first, by path, the metrics of each, the variables after all."""

    gradients: dict[str, np.ndarray]
    metrics: list[dict[str, float]]
    variables: dict[str, np.ndarray]


@dataclass(frozen=True)
class Expected:
    """What one device made of batches that were drawn by `seed`, from its initial `parameters` on."""

    problem: Problem
    seed: int
    parameters: Any
    batches: list[Any]
    trained: Trained


def num_devices(layout: Layout) -> int:
    return math.prod(layout.mesh.values())


def devices(layout: Layout) -> list[Any]:
    return jax.devices()[: num_devices(layout)]


def train(program: Program, state: Any, batches: list[Any]) -> Trained:
    """The steps of `batches`, with AdamW."""
    assert isinstance(program.optimizer, AdamW)
    metrics: list[dict[str, float]] = []
    gradients: dict[str, np.ndarray] = {}
    for batch in batches:
        state, found = program.step(state, program.place(batch))
        metrics.append({name: float(value) for name, value in found.items() if name not in ("norms", "tokens")})
        if not gradients:  # Adam's first moment after one step is (1 − b1) of the gradient
            moment = flattened(jax.device_get(state.optimizer["direction"].mu))
            gradients = {path: np.asarray(m, np.float64) / (1 - program.optimizer.b1) for path, m in moment.items()}
    return Trained(gradients, metrics, flattened(jax.device_get(state.variables)))


def on_one_device(problem: Problem, packed_batch: Callable[..., Any]) -> Expected:
    """Values and batches, drawn once for all layouts; others, where rounding could change a token's experts."""
    seed = int(os.environ["AXON_TEST_SEED"])
    rng = np.random.default_rng(seed)
    one = problem.program(Layout({"data": 1}, microbatches=problem.microbatches), seed)
    parameters = _with_adapters(rng, jax.device_get(one.init().parameters))
    with router_margins() as margins:
        while True:
            margins.clear()
            batches = problem.batches(rng, packed_batch)
            trained = train(one, one.begin(parameters), batches)
            jax.effects_barrier()
            if min(margins, default=math.inf) > MARGIN:
                return Expected(problem, seed, parameters, batches, trained)


def _with_adapters(rng: np.random.Generator, parameters: Any) -> Any:
    """Parameters, those that LoRA begins with 0 drawn: of zeros the other factors would have no gradient."""

    def drawn(path: str, x: np.ndarray) -> np.ndarray:
        return rng.normal(0, 0.1, x.shape).astype(x.dtype) if path.endswith("/b") else x

    return nested({path: drawn(path, x) for path, x in flattened(parameters).items()})


def once_each(problems: Mapping[str, Problem], packed_batch: Callable[..., Any]) -> Callable[[str], Expected]:
    """`on_one_device` of the problem of a name, the first time that it is asked for."""
    return cache(lambda name: on_one_device(problems[name], packed_batch))


@contextmanager
def router_margins() -> Iterator[list[float]]:
    """A list to which a step that is traced now adds by how much, in each layer, the last expert of any token, or the
    last group, scores above the next."""
    margins: list[float] = []
    top_k = lax.top_k

    def measured(scores: Array, k: int) -> Any:
        if k < scores.shape[-1]:
            best, _ = top_k(scores, k + 1)
            jax.debug.callback(lambda least: margins.append(float(least)), jnp.min(best[..., -2] - best[..., -1]))
        return top_k(scores, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.lax, "top_k", measured)
        yield margins


def check(layout: Layout, expected: Expected) -> tuple[Program, Trained]:
    """Train on `layout`, and compare: what trained, and what it made."""
    print(f"seed {expected.seed}")
    program = expected.problem.program(layout, expected.seed)
    assert_zero_splits(program.placement)
    ours = train(program, program.begin(expected.parameters), expected.batches)
    tolerance = expected.problem.tolerance
    assert_gradients_agree(ours.gradients, expected.trained.gradients, tolerance)
    assert_metrics_agree(ours.metrics, expected.trained.metrics, tolerance, expected.problem.subtracted)
    for path, value in expected.trained.variables.items():
        own = without_padding(ours.variables[path], value)
        np.testing.assert_allclose(own, value, rtol=expected.problem.recorded_tolerance, err_msg=path)
    return program, ours


def check_in_a_process(layout: Layout, expected: Expected, folder: Path) -> None:
    """`check` on more devices than there are here, by a process that has as many."""
    (folder / "given").write_bytes(pickle.dumps((layout, expected)))
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices(layout)}"
    run = subprocess.run(
        [sys.executable, __file__, str(folder / "given")],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def assert_zero_splits(placement: Any) -> None:
    """Every kind of array that the layout's ZeRO stage names is split."""
    for kind in KINDS[len(KINDS) - placement.layout.zero :]:
        assert "data" in placement.layout.table(kind)["embed"], kind


def assert_gradients_agree(
    ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
    whole = np.sqrt(sum(np.sum(g**2) for g in expected.values()))
    assert ours.keys() == expected.keys()
    for path, other in expected.items():
        error = np.linalg.norm(without_padding(ours[path], other) - other)
        error /= max(np.linalg.norm(other), 1e-3 * whole)
        assert error <= tolerance, (path, error)


def assert_metrics_agree(
    ours: list[dict[str, float]],
    expected: list[dict[str, float]],
    tolerance: float = 1e-5,
    subtracted: Mapping[str, float] = MappingProxyType({}),
) -> None:
    for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            atol = max(1e-7, tolerance * subtracted.get(name, 0.0))
            np.testing.assert_allclose(one[name], value, rtol=tolerance, atol=atol, err_msg=f"{name}, step {step}")


def without_padding(value: np.ndarray, like: np.ndarray) -> np.ndarray:
    """`value` of layers as many as `like` has: those of a pipeline's padding, at the end, are 0."""
    if value.shape == like.shape:
        return value
    assert not np.any(value[len(like) :])
    return value[: len(like)]


if __name__ == "__main__":
    check(*pickle.loads(Path(sys.argv[1]).read_bytes()))
