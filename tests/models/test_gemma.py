"""Gemma 2 and 3: which layers see what, published sizes, and the scale of the embedding."""

import jax.numpy as jnp
import numpy as np
import pytest

from axon.nn import Inputs, LinearScaling, Rope, parameters
from models.gemma import Gemma

BASE = {"vocab": 40, "embed": 24, "layers": 7, "heads": 4, "kv_heads": 2, "mlp": 32, "head_dim": 6, "window": 5}
WIDE = {"vocab": 256_000, "head_dim": 256, "window": 4096}
PUBLISHED = [
    (Gemma(**WIDE, embed=2304, layers=26, heads=8, kv_heads=4, mlp=9216), 2_614_341_888),
    (Gemma(**WIDE, embed=3584, layers=42, heads=16, kv_heads=8, mlp=14_336), 9_241_705_984),
    (Gemma(**WIDE | {"head_dim": 128}, embed=4608, layers=46, heads=32, kv_heads=16, mlp=36_864), 27_227_128_320),
    (
        Gemma(262_144, 1152, 26, heads=4, kv_heads=1, mlp=6912, head_dim=256, window=512, local_layers=5, qk_norm=True),
        999_885_952,
    ),
]


@pytest.mark.parametrize(("config", "count"), PUBLISHED, ids=["2 2B", "2 9B", "2 27B", "3 1B"])
def test_published_shapes_have_the_published_number_of_parameters(config, count):
    assert sum(spec.size for spec in parameters(config.build()).values()) == count


@pytest.mark.parametrize("local_layers", [1, 2, 5, 9])
def test_every_so_many_layers_one_sees_everything_and_the_others_a_window(local_layers):
    config = Gemma(**BASE, local_layers=local_layers, local_rope=Rope(10.0), rope=Rope(1e6, LinearScaling(8.0)))
    blocks = config.build().layers.blocks.values()
    kinds = {layer: block.attention for block in blocks for layer in block.mlp.up.layers}
    assert sorted(kinds) == list(range(7))
    for layer, attention in kinds.items():
        full = (layer + 1) % (local_layers + 1) == 0
        assert ("window 5" in str(attention.config.mask)) != full
        assert attention.rope == (config.rope if full else config.local_rope)


def test_flops_count_the_window_in_the_layers_that_have_one():
    windowed, wide = (Gemma(**BASE | {"window": w}).build().flops_per_token(64) for w in (5, 64))
    seen = np.mean([min(i + 1, 5) for i in range(64)])
    assert wide - windowed == 3 * 4 * ((4 * 4 * 6 * 32) - round(4 * 4 * 6 * seen))


def test_embeddings_are_scaled_by_a_factor_in_the_compute_dtype(rng, placed, compiled, bind, random_parameters):
    module, ids = Gemma(**BASE).build(), rng.integers(0, 40, (2, 4), dtype=np.int32)
    values = random_parameters(module, rng)
    embed = lambda values: bind(module, values).embed(Inputs(ids, ids))  # noqa: E731
    narrow = jnp.asarray(values["embedding"]["table"][ids], jnp.bfloat16)
    factor = jnp.asarray(24**0.5, jnp.bfloat16)
    assert float(factor) != 24**0.5
    np.testing.assert_array_equal(compiled(placed(), embed, values, compute=jnp.bfloat16), narrow * factor)
