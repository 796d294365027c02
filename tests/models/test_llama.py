"""Llama and its relatives against the same mathematics written out in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.nn import Llama3Scaling, Rope, parameters
from models.llama import Llama

BASE = {"vocab": 40, "embed": 24, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 32}
VARIANTS = {
    "scaled": {"rope": Rope(500.0, Llama3Scaling(8.0, 1.0, 4.0, 16))},
    "tied": {"tied": True},
    "mistral": {"window": 6, "kv_heads": 1},
    "qwen2": {"bias": True, "tied": True, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "head_dim": 10, "kv_heads": 4},
    "scanned": {"bias": True},
}


def rms(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def frequencies(rope, width):
    found = []
    for i in range(width // 2):
        f = rope.theta ** (-2 * i / width)
        if rope.scaling is not None:
            s, wavelength = rope.scaling, 2 * np.pi / f
            smooth = (s.original / wavelength - s.low) / (s.high - s.low)
            if wavelength > s.original / s.low:
                f = f / s.factor
            elif wavelength >= s.original / s.high:
                f = (1 - smooth) * f / s.factor + smooth * f
        found.append(f)
    return np.asarray(found)


def plain_loss(config, values, batch):
    """Mean negative log-likelihood over real tokens: one row, one layer and one head at a time."""
    width = config.head_dim or config.embed // config.heads
    block = values["layers"]["block"]

    def of_row(row):
        tokens, targets, positions, documents, weights = row
        index = np.arange(len(tokens))
        seen = (index[:, None] >= index) & (documents[:, None] == documents)
        if config.window is not None:
            seen &= index[:, None] - index < config.window
        angle = positions[:, None] * frequencies(config.rope, width)

        def turn(x):
            a, b = x[:, : width // 2], x[:, width // 2 :]
            return jnp.concatenate(
                [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], 1
            )

        x = values["embedding"]["table"][tokens]
        for layer in range(config.layers):
            p = jax.tree.map(lambda v, layer=layer: v[layer], block)
            h, a, mixed = rms(x, p["attention_norm"]["scale"], config.norm_eps), p["attention"], 0
            for head in range(config.heads):
                kv = head * config.kv_heads // config.heads
                q, k, v = (h @ a[n][:, i] for n, i in (("query", head), ("key", kv), ("value", kv)))
                if config.bias:
                    q, k, v = q + a["query_bias"][head], k + a["key_bias"][kv], v + a["value_bias"][kv]
                if config.qk_norm:
                    q = rms(q, a["query_norm"]["scale"], config.norm_eps)
                    k = rms(k, a["key_norm"]["scale"], config.norm_eps)
                scores = jnp.where(seen, turn(q) @ turn(k).T / width**0.5, -jnp.inf)
                mixed = mixed + jax.nn.softmax(scores, axis=-1) @ v @ a["out"][head]
            x = x + mixed
            h, m = rms(x, p["mlp_norm"]["scale"], config.norm_eps), p["mlp"]
            x = x + (jax.nn.silu(h @ m["gate"]) * (h @ m["up"])) @ m["down"]
        x = rms(x, values["norm"]["scale"], config.norm_eps)
        logits = x @ (values["embedding"]["table"].T if config.tied else values["head"])
        nll = jax.nn.logsumexp(logits, -1) - logits[index, targets]
        return jnp.sum(nll * weights)

    rows = tuple(batch[n] for n in ("tokens", "targets", "positions", "documents", "weights"))
    return jnp.sum(jax.lax.map(of_row, rows)) / batch["weights"].sum()


@pytest.mark.few(name=("scanned",))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "tied" else name for name in VARIANTS],  # as qwen2 is
)
def test_loss_and_gradients_are_those_of_the_plain_model(name, agrees):
    options = {"unroll": False, "remat": "minimal"} if name == "scanned" else {}
    agrees(Llama(**BASE | VARIANTS[name]), plain_loss, **options)


LLAMA3 = {"vocab": 128256, "kv_heads": 8}
PUBLISHED = [
    (Llama(**LLAMA3, embed=4096, layers=32, heads=32, mlp=14336), 8_030_261_248),
    (Llama(**LLAMA3, embed=8192, layers=80, heads=64, mlp=28672), 70_553_706_496),
    (Llama(**LLAMA3, embed=16384, layers=126, heads=128, mlp=53248), 405_853_388_800),
    (Llama(vocab=32000, embed=4096, layers=32, heads=32, kv_heads=32, mlp=11008), 6_738_415_616),
    (Llama(vocab=32000, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, window=4096), 7_241_732_096),
    (Llama(vocab=151936, embed=896, layers=24, heads=14, kv_heads=2, mlp=4864, bias=True, tied=True), 494_032_768),
    (
        Llama(
            vocab=151936, embed=1024, layers=28, heads=16, kv_heads=8, mlp=3072, head_dim=128, qk_norm=True, tied=True
        ),
        596_049_920,
    ),
    (Llama(vocab=32064, embed=3072, layers=32, heads=32, kv_heads=32, mlp=8192, window=2047), 3_821_079_552),
    (Llama(vocab=200064, embed=3072, layers=32, heads=24, kv_heads=8, mlp=8192, tied=True), 3_836_021_760),
    (
        Llama(vocab=128256, embed=2048, layers=36, heads=16, kv_heads=4, mlp=11008, tied=True, nope_every=4),
        3_075_098_624,
    ),
]


@pytest.mark.parametrize(
    ("config", "count"),
    PUBLISHED,
    ids=["8B", "70B", "405B", "llama2", "mistral", "qwen2.5", "qwen3", "phi3", "phi4", "smollm3"],
)
def test_published_shapes_have_the_published_number_of_parameters(config, count):
    assert sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in parameters(config.build()).values()) == count


@pytest.mark.parametrize(("layers", "every"), [(8, 4), (7, 3), (2, 3), (3, 1)])
def test_every_so_many_layers_one_does_not_rotate(layers, every):
    blocks = Llama(**BASE | {"layers": layers}, nope_every=every).build().layers.blocks.values()
    rotates = {layer: block.attention.rope is not None for block in blocks for layer in block.mlp.up.layers}
    assert rotates == {layer: bool((layer + 1) % every) for layer in range(layers)}
