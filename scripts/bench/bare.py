"""The reference model's training step written by hand in JAX, without a framework: the baseline.

A Llama without grouped keys, in float32 on one device, with the three things that make JAX fast on a CPU: weights
multiply `[batch·seq, embed]`, causal attention goes in blocks of queries, layers are written out.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.train.optimizers import AdamW
from models.llama import Llama

BLOCK = 64
"""Queries a block of attention."""


def make_step(model: Llama, optimizer: AdamW, batch: int, seq: int) -> Callable[..., Any]:
    """The compiled `step(parameters, moments, count, batch) -> (parameters, moments, count, metrics)`.

    The moments are a tree of (m, v) like the parameters; all three are donated. The learning rate is the schedule's.
    """
    heads, width = model.heads, model.dims["head_dim"]
    tokens = batch * seq
    learning_rate = optimizer.schedule.function()

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + model.norm_eps) * scale

    def attention(q, k, v, documents):
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
        parts = []
        for low in range(0, seq, BLOCK):
            high = min(low + BLOCK, seq)
            causal = jnp.arange(high)[None, :] <= jnp.arange(low, high)[:, None]
            same = documents[:, low:high, None] == documents[:, None, :high]
            parts.append(_attend(q[:, :, low:high], k[:, :, :high], v[:, :, :high], (causal & same)[:, None]))
        return jnp.concatenate(parts, 2).transpose(0, 2, 1, 3).reshape(tokens, heads * width)

    def block(x, p, cos, sin, documents):
        h = norm(x, p["attention_norm"])
        q, k, v = ((h @ p[name]).reshape(batch, seq, heads, width) for name in ("query", "key", "value"))
        x = x + attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, documents) @ p["out"]
        h = norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(parameters, batch):
        x = parameters["embedding"][batch["tokens"]].reshape(tokens, -1)
        angles = batch["positions"][..., None] * model.rope.theta ** (-jnp.arange(0, width, 2) / width)
        cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
        for p in parameters["layers"]:
            x = block(x, p, cos, sin, batch["documents"])
        logits = norm(x, parameters["norm"]) @ parameters["head"]
        picked = jnp.take_along_axis(logits, batch["targets"].reshape(tokens, 1), -1)[:, 0]
        weights = batch["weights"].reshape(tokens)
        return jnp.sum(weights * (jax.nn.logsumexp(logits, -1) - picked)) / jnp.sum(weights)

    def step(parameters, moments, count, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        if optimizer.clip is not None:
            factor = jnp.minimum(1.0, optimizer.clip / (size + 1e-6))
            gradients = jax.tree.map(lambda g: g * factor, gradients)
        rate = learning_rate(count)
        leaves, tree = jax.tree.flatten(parameters)
        parts = zip(leaves, tree.flatten_up_to(gradients), tree.flatten_up_to(moments), strict=True)
        new = [_adamw(optimizer, p, g, m, count + 1, rate) for p, g, m in parts]
        parameters, moments = (tree.unflatten(one[i] for one in new) for i in range(2))
        return parameters, moments, count + 1, {"loss": value, "grad_norm": size, "learning_rate": rate}

    return jax.jit(step, donate_argnums=(0, 1, 2))


def _rotate(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attend(q, k, v, seen):
    scores = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)


def _adamw(optimizer, p, g, moments, count, rate):
    m, v = moments
    m = optimizer.b1 * m + (1 - optimizer.b1) * g
    v = optimizer.b2 * v + (1 - optimizer.b2) * g * g
    update = m / (1 - optimizer.b1**count) / (jnp.sqrt(v / (1 - optimizer.b2**count)) + optimizer.eps)
    decay = optimizer.weight_decay if p.ndim > 1 else 0.0
    return p - rate * (update + decay * p), (m, v)


def bare_state(parameters: Mapping[str, Any], model: Llama) -> tuple[Any, Any, Array]:
    """Parameters, moments and count for `make_step`, copied from the parameters of a `Program`'s state."""
    stacked, embed = parameters["layers"]["block"], model.embed

    def layer(i):
        attention, mlp = stacked["attention"], stacked["mlp"]
        matrices = {name: attention[name][i].reshape(embed, -1) for name in ("query", "key", "value")}
        matrices |= {name: mlp[name][i] for name in ("gate", "up", "down")}
        norms = {name: stacked[name]["scale"][i] for name in ("attention_norm", "mlp_norm")}
        return {**matrices, **norms, "out": attention["out"][i].reshape(-1, embed)}

    flat = {
        "embedding": parameters["embedding"]["table"],
        "head": parameters["head"],
        "norm": parameters["norm"]["scale"],
        "layers": [layer(i) for i in range(model.layers)],
    }
    flat = jax.tree.map(jnp.copy, flat)
    return flat, jax.tree.map(lambda p: (jnp.zeros_like(p), jnp.zeros_like(p)), flat), jnp.zeros((), jnp.int32)
