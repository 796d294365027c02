"""DeepSeek: published sizes, which layers have experts, and FLOPs with a second token."""

import pytest

from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import known
from axon.nn import Routing, parameters, variables
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
        (DeepSeek(102_400, 2048, 27, 27, 16, 10_944, q_latent=None), 13_763_072),
    ],
    ids=["V3", "V2-Lite"],
)
def test_attention_has_the_published_number_of_parameters(config, count):
    attention = [s for p, s in parameters(config.build()).items() if "/attention/" in p]
    assert sum(spec.size for spec in attention) == config.layers * count


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (DeepSeek(), 671_026_404_352),
        (
            DeepSeek(
                102_400, 5120, 60, 1, 128, 12_288, 1536, Routing(160, 6, groups=8, kept_groups=3, group_best=1), 3072
            ),
            235_741_434_880,
        ),
        (DeepSeek(102_400, 2048, 27, 1, 16, 10_944, 1408, Routing(64, 6), 2816, q_latent=None), 15_706_484_224),
    ],
    ids=["V3", "V2", "V2-Lite"],
)
def test_it_has_the_published_number_of_parameters(config, count):
    assert sum(spec.size for spec in parameters(config.build()).values()) == count


def test_layers_after_the_first_and_the_multi_token_block_have_experts():
    routing = Routing(4, 2, bias_rate=0.1)
    module = DeepSeek(**vars(SMALL) | {"layers": 5, "routing": routing, "multi_token": True}).build()
    shapes = {path: spec.shape for path, spec in parameters(module).items()}
    assert (shapes["layers/dense/mlp/up"], shapes["layers/experts/moe/up"]) == ((2, 24, 32), (3, 4, 24, 2048))
    assert shapes["mtp/block/moe/up"] == (4, 24, 2048)
    assert {path: spec.shape for path, spec in variables(module).items() if path.endswith("bias")} == {
        "layers/experts/moe/router/bias": (3, 4),
        "mtp/block/moe/router/bias": (4,),
    }


def test_the_multi_token_block_is_the_layer_after_the_last_in_published_files():
    """Names as in DeepSeek-V3's repository, and the order of the joined matrices: first that of the embedding."""
    routing = Routing(4, 2, bias_rate=0.1)
    config = DeepSeek(**vars(SMALL) | {"layers": 3, "routing": routing, "shared": 16, "multi_token": True})
    table, module = known()["DeepseekV3ForCausalLM"], config.build()
    pieces = pieces_of(table, module, config.vocab)
    own = {name.removeprefix("model.layers.3."): shape for name, shape in pieces.shapes.items() if ".layers.3." in name}
    assert own["eh_proj.weight"] == (24, 48)
    names = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "mlp.gate", "mlp.experts.3.up_proj")
    assert {f"{name}.weight" for name in names} <= own.keys()
    starts = [pieces.of[f"mtp/{name}"][0].start for name in ("from_embedding", "from_hidden")]
    assert starts == [0, 24]
    plain = pieces_of(table, DeepSeek(**vars(config) | {"multi_token": False}).build(), config.vocab)
    assert plain.shapes.keys() == {name for name in pieces.shapes if ".layers.3." not in name}


def test_flops_of_a_second_token_are_those_of_a_layer_a_projection_and_the_head(rng):
    seq = int(rng.integers(2, 64))
    one, two = (DeepSeek(**vars(SMALL) | {"multi_token": m}).build() for m in (False, True))
    layer = one.layers.flops(seq) // 2
    assert two.flops_per_token(seq) - one.flops_per_token(seq) == 3 * (layer + 2 * 2 * 24 * 24 + 2 * 24 * 40)
