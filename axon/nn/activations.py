"""Activations, by the names that `transformers` 5.23 has for those without parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.checks import check_range
from axon.errors import UserError, suggest

Activation = Callable[[Array, Array], Array]
"""Of a gated MLP's gate and up, each `… mlp`, what goes into its last product."""


def gelu(x: Array) -> Array:
    """By its tanh form (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


def exact_gelu(x: Array) -> Array:
    """x·Φ(x), Φ the normal distribution function (the same)."""
    return jax.nn.gelu(x, approximate=False)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate · σ(alpha · gate) · (up + 1), of a gate of at most `limit` and an up within ±`limit`: gpt-oss's
    (OpenAI, arXiv:2508.10925)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        check_range(self, "(0, inf)", "alpha", "limit")

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), exact_gelu),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), gelu),
    "gelu_10": lambda x: jnp.clip(exact_gelu(x), -10, 10),
    "hardswish": jax.nn.hard_swish,
    "laplace": lambda x: 0.5 * (1 + jax.lax.erf((x - 0.707107) / (0.282095 * 2**0.5))),
    "leaky_relu": jax.nn.leaky_relu,
    "linear": lambda x: x,
    "mish": jax.nn.mish,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "tanh": jnp.tanh,
}


@cache
def gated(name: str) -> Activation:
    """activation(gate) · up, by the activation's name: GEGLU of "gelu" (Shazeer, arXiv:2002.05202)."""
    of_gate = ACTIVATIONS[name]
    return lambda gate, up: of_gate(gate) * up


swiglu = gated("silu")
"""silu(gate) · up (the same)."""


def check_activation(config: Any) -> None:
    """Raise `UserError` unless the `activation` of a model's config is the name of one."""
    if config.activation is not None and config.activation not in ACTIVATIONS:
        raise UserError(
            f"{type(config).__name__}.activation is {config.activation!r}; there is no such activation."
            f"{suggest(str(config.activation), ACTIVATIONS)}"
        )
