"""A few parameters of every kind, stacked layers among them, and steps of an optimizer on them without a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.nn import ParamSpec
from axon.train.optimizers import Optimizer

Values = dict[str, np.ndarray]


def spec(axes: str, sizes: Mapping[str, int], inputs: str, decay: bool = True) -> ParamSpec:
    names = tuple(axes.split())
    stack = int(names[0] == "layers")
    return ParamSpec(names, tuple(sizes[n] for n in names), jnp.float32, "params", stack, tuple(inputs.split()), decay)


SIZES = {"layers": 3, "embed": 8, "heads": 2, "head_dim": 6, "mlp": 20, "experts": 4, "vocab": 10}
PARAMETERS = {
    "embedding/table": spec("vocab embed", SIZES, "vocab"),
    "head": spec("embed vocab", SIZES, "embed"),
    "layers/query": spec("layers embed heads head_dim", SIZES, "embed"),
    "layers/query_bias": spec("layers heads head_dim", SIZES, "heads", decay=False),
    "layers/out": spec("layers heads head_dim embed", SIZES, "heads head_dim"),
    "layers/up": spec("layers embed mlp", SIZES, "embed"),
    "layers/down": spec("layers mlp embed", SIZES, "mlp"),
    "layers/expert": spec("layers experts embed mlp", SIZES, "embed"),
    "layers/scale": spec("layers embed", SIZES, "embed", decay=False),
}


@pytest.fixture
def parameters() -> dict[str, ParamSpec]:
    """Path → specification."""
    return dict(PARAMETERS)


@pytest.fixture
def draw(rng, parameters) -> Callable[[], Values]:
    """draw(): Gaussian values for every parameter."""
    return lambda: {path: rng.normal(size=spec.shape).astype(np.float32) for path, spec in parameters.items()}


@dataclass(frozen=True)
class Moved:
    """Values and state after some steps, as NumPy's arrays."""

    values: dict[str, Any]
    state: Any


@pytest.fixture(scope="session")
def moved() -> Callable[..., Moved]:
    """moved(optimizer, parameters, values, gradients): after a step for each of the gradients, from `state` on."""
    compiled: dict[Any, tuple[Any, Any]] = {}

    def run(
        optimizer: Optimizer, parameters: Mapping[str, ParamSpec], values: Any, gradients: Any, state: Any = None
    ) -> Moved:
        key = optimizer, tuple(parameters.items())
        if key not in compiled:
            transform = optimizer.transform(parameters)
            compiled[key] = jax.jit(transform.init), jax.jit(transform.update)
        init, update = compiled[key]
        values = {path: np.asarray(value, parameters[path].dtype) for path, value in values.items()}
        state = init(values) if state is None else state
        for gradient in gradients:
            gradient = {path: np.asarray(g, parameters[path].dtype) for path, g in gradient.items()}
            updates, state = update(gradient, state, values)
            values = added(values, updates)
        return Moved(*jax.device_get((values, state)))

    return run


@jax.jit
def added(values: Any, updates: Any) -> Any:
    return values | {p: (values[p] + step).astype(values[p].dtype) for p, step in updates.items()}


@pytest.fixture
def unstacked() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """unstacked(specs or values): each layer a parameter of its own, `layers/up` → `layers/0/up`, …"""

    def split(tree: Mapping[str, Any]) -> dict[str, Any]:
        apart = {}
        for path, one in tree.items():
            if not path.startswith("layers/"):
                apart[path] = one
                continue
            for layer in range(SIZES["layers"]):
                apart[path.replace("layers/", f"layers/{layer}/")] = _of_layer(one, layer)
        return apart

    return split


def _of_layer(one: Any, layer: int) -> Any:
    if isinstance(one, ParamSpec):
        return replace(one, axes=one.axes[1:], shape=one.shape[1:], stack=0)
    return one[layer]
