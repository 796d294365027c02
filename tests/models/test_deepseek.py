"""DeepSeek: published sizes of its attention, FLOPs with a second token, and what cannot be."""

import pytest

from axon.errors import UserError
from axon.nn import parameters
from models.deepseek import DeepSeek

SMALL = DeepSeek(
    vocab=40,
    embed=24,
    layers=2,
    first_dense=2,
    heads=4,
    mlp=32,
    q_latent=16,
    kv_latent=12,
    nope_dim=6,
    rope_dim=4,
    value_dim=8,
)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (DeepSeek(first_dense=61), 187_107_328),
        (DeepSeek(102_400, 2048, 27, 27, heads=16, mlp=10_944, q_latent=None), 13_763_072),
    ],
    ids=["V3", "V2-Lite"],
)
def test_attention_has_the_published_number_of_parameters(config, count):
    attention = [s for p, s in parameters(config.build()).items() if "/attention/" in p]
    assert sum(spec.size for spec in attention) == config.layers * count


def test_flops_of_a_second_token_are_those_of_a_layer_a_projection_and_the_head(rng):
    seq = int(rng.integers(2, 64))
    one, two = (DeepSeek(**vars(SMALL) | {"multi_token": m}).build() for m in (False, True))
    layer = one.layers.flops(seq) // 2
    assert two.flops_per_token(seq) - one.flops_per_token(seq) == 3 * (layer + 2 * 2 * 24 * 24 + 2 * 24 * 40)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_latent": 0}, "DeepSeek.kv_latent is 0; must be at least 1"),
        ({"rope_dim": 5}, "DeepSeek: rope_dim 5 is odd"),
        ({"first_dense": 3}, "DeepSeek: first_dense 3 is more than layers 2"),
        ({"remat": ("kv_latnt",)}, "Did you mean 'kv_latent'?"),
    ],
)
def test_a_shape_that_is_none_is_refused(fields, message):
    with pytest.raises(UserError) as caught:
        DeepSeek(**vars(SMALL) | fields)
    assert message in str(caught.value)
