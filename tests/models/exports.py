"""A model of each family with every field of its config unlike its default, and how it goes out.

Run as a script it stores that in fixtures/exports.json; `fixtures/make.py exports` opens each in `transformers`, and
stores a sketch of its logits in fixtures/exports.npz.
"""

import json
from pathlib import Path
from typing import Any

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.nn import (
    ClampedSwiGLU,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Routing,
    YarnScaling,
)
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama
from models.mixtral import Mixtral
from models.olmo import Olmo
from models.t5 import T5
from models.vit import ViT

# Whole numbers where a person may write them, as in a config: 1, not 1.0.
SIZES = {"vocab": 40, "embed": 24, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 20, "norm_eps": 1}
YARN = YarnScaling(4, 64, fast=2, slow=0.5, attention_factor=2, truncate=False)
BIASES = {"bias": True, "out_bias": True, "mlp_bias": True}
MSCALE = YarnScaling(4, 64, fast=2, slow=0.5, mscale=2, mscale_all_dim=1)
LLAMA3 = Llama3Scaling(4, 1, 4, 64)
LONG = LongRopeScaling((1, 1.5, 2), (2, 4, 8), original=16, factor=2, attention_factor=2)
T5_SIZES = {"vocab": 40, "embed": 24, "encoder_layers": 2, "decoder_layers": 3, "heads": 4, "head_dim": 8, "mlp": 20}
T5_MORE = {"buckets": 12, "max_distance": 20, "norm_eps": 1, "start_id": 3, "dropout": 0}
LATENT = {
    "vocab": 40,
    "embed": 24,
    "layers": 3,
    "first_dense": 1,
    "heads": 4,
    "mlp": 20,
    "expert_mlp": 12,
    "shared": 24,
    "kv_latent": 12,
    "nope_dim": 6,
    "rope_dim": 8,
    "value_dim": 10,
    "norm_eps": 1,
}
EXPORTS = {
    "llama": Llama(**SIZES, **BIASES, head_dim=10, rope=Rope(500, LLAMA3), tied=True, activation="gelu"),
    "llama proportional": Llama(**SIZES, rope=Rope(500, ProportionalScaling(0.7, 2))),
    "llama of heads that do not divide": Llama(**SIZES | {"embed": 26}, head_dim=6, rope=Rope(500, LinearScaling(2))),
    "llama longrope": Llama(**SIZES, rope=Rope(500, LONG)),
    "mistral": Llama(**SIZES, head_dim=10, rope=Rope(500, YARN), window=6),
    "qwen2": Llama(**SIZES, head_dim=10, rope=Rope(500, DynamicScaling(2, 16)), bias=True, tied=True),
    "qwen2 with a window": Llama(
        **SIZES | {"layers": 4}, rope=Rope(500), bias=True, window=6, full_layers=1, activation="relu"
    ),
    "qwen3": Llama(**SIZES, head_dim=10, rope=Rope(500, LinearScaling(2)), qk_norm=True, tied=True),
    "qwen3 longrope": Llama(**SIZES, rope=Rope(500, LONG), qk_norm=True),
    "smollm3": Llama(**SIZES | {"layers": 4}, head_dim=10, rope=Rope(500, MSCALE), nope_every=2),
    "phi3": Llama(**SIZES | {"heads": 3, "kv_heads": 1}, rope=Rope(500, LONG, 0.75), window=6, tied=True),
    "gemma2": Gemma(
        **SIZES | {"layers": 4},
        head_dim=10,
        window=6,
        rope=Rope(500, YARN),
        local_rope=Rope(500, YARN),
        query_pre_attn_scalar=20.0,
        soft_cap=2,
        logit_soft_cap=3,
        bias=True,
        activation="silu",
        tied=False,
    ),
    "gemma3": Gemma(
        **SIZES | {"layers": 4},
        head_dim=10,
        window=6,
        local_layers=2,
        rope=Rope(500, YARN),
        local_rope=Rope(50, LinearScaling(2)),
        query_pre_attn_scalar=20.0,
        qk_norm=True,
        logit_soft_cap=3,
    ),
    "gpt_oss": GptOss(
        **SIZES,
        head_dim=10,
        routing=Routing(6, 3),
        activation=ClampedSwiGLU(2, 3),
        window=6,
        rope=Rope(500),
        tied=True,
    ),
    "mixtral": Mixtral(
        **SIZES, head_dim=10, routing=Routing(6, 3), rope=Rope(500, YARN), window=6, tied=True, activation="gelu"
    ),
    "mixtral without head_dim": Mixtral(**SIZES, routing=Routing(6, 3), rope=Rope(500, YARN)),
    "qwen3_moe": Mixtral(
        **SIZES,
        head_dim=10,
        routing=Routing(6, 3, normalise=False),
        rope=Rope(500, LLAMA3),
        qk_norm=True,
        bias=True,
        tied=True,
    ),
    "olmo2": Olmo(
        **SIZES,
        head_dim=10,
        rope=Rope(500, LINEAR := LinearScaling(2)),
        local_rope=Rope(500, LINEAR),
        bias=True,
        activation="gelu",
        tied=True,
    ),
    "olmo3": Olmo(
        **SIZES | {"layers": 4},
        head_dim=10,
        window=6,
        local_layers=1,
        rope=Rope(500, YARN),
        local_rope=Rope(50, LLAMA3),
    ),
    "deepseek_v2": DeepSeek(
        **LATENT,
        routing=Routing(12, 3, normalise=False, scale=2, groups=3, kept_groups=2, group_best=1),
        q_latent=16,
        rope=Rope(500, MSCALE),
        activation="gelu",
        tied=True,
    ),
    "deepseek_v3": DeepSeek(
        **LATENT,
        routing=Routing(
            12, 3, "sigmoid", normalise=False, scale=2, groups=3, kept_groups=2, group_best=2, bias_rate=0.1
        ),
        q_latent=None,
        rope=Rope(500, MSCALE),
        interleaved=False,
        multi_token=True,
    ),
    "gpt2": GPT2(
        vocab=40,
        embed=24,
        layers=2,
        heads=4,
        mlp=20,
        positions=72,
        norm_eps=1,
        dropout=0,
        tied=False,
        activation="relu",
    ),
    "bert": Bert(40, 24, 2, 4, 20, positions=72, types=3, norm_eps=1, dropout=0, activation="relu"),
    "bert alone": Bert(40, 24, 2, 4, 20, positions=72, types=3, norm_eps=1, dropout=0, head=False, pooler=True),
    "vit": ViT(12, 4, 2, 24, 2, 4, 20, classes=5, norm_eps=1, dropout=0, activation="relu"),
    "t5": T5(**T5_SIZES, **T5_MORE, gated=False, tied=True),
    "t5 v1.1": T5(**T5_SIZES, **T5_MORE, gated=True, tied=False, activation="silu"),
    "t5 tied, unscaled": T5(**T5_SIZES, **T5_MORE, gated=False, tied=True, scaled=False),
    "t5 untied, scaled": T5(**T5_SIZES, **T5_MORE, gated=True, tied=False, scaled=True),
}
FILE = Path(__file__).parent / "fixtures" / "exports.json"


def going_out(model: Any) -> dict[str, Any]:
    """The config.json of a model, and the shapes of its arrays in files."""
    table = table_for(model)
    pieces = pieces_of(table, model.build(), getattr(model, "vocab", None))
    shapes = {name: list(pieces.shapes[name]) for name in sorted(pieces.shapes)}
    return {"config": write_config(table, model), "shapes": shapes}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(going_out(model))}" for name, model in EXPORTS.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
