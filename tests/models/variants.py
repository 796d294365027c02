"""Config.jsons of tiny models, each field of a family present, absent, null or otherwise switched: what `transformers`
computes from each is stored in fixtures/variants/ by fixtures/make_variants.py.

As reference.py: neither torch nor JAX. Weights are not stored but drawn, each from its name and shape.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import reference

FOLDER = Path(__file__).parent / "fixtures" / "variants"
ABSENT = "absent"
EQUAL, OTHER = "equal", "other"
"""What else is stored under a name: the same as the array it is a copy of, or another."""


@dataclass(frozen=True)
class Case:
    """A config.json: `changes` of the family's base, and arrays that are `stored` besides, as copies of others or not.

    `refused`, `taken`: by Axon alone, which names a field that is changed where it refuses it.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    refused: bool = False
    taken: bool = False

    @property
    def name(self) -> str:
        return json.dumps(self.changes) + (json.dumps(self.stored) if self.stored else "")


def cases(family: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case of a family with its config.json."""
    base = BASES[family]
    for case in {case.name: case for case in CASES[family]}.values():
        changed = base | case.changes
        yield case, {name: value for name, value in changed.items() if value != ABSENT}


def arrays(family: str, case: Case, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """All that is stored: a value for each of a model's `shapes`, and what the case has besides."""
    found = reference.weights(family, shapes)
    for name, (of, what) in case.stored.items():
        found[name] = found[of].copy() if what == EQUAL else reference.weights(family, {name: found[of].shape})[name]
    return found


def some(logits: np.ndarray) -> list[float]:
    """A few of all logits, to six digits."""
    flat = np.ravel(logits)
    return [float(f"{value:.6g}") for value in flat[:: max(1, len(flat) // 12)]]


def load(family: str) -> dict[str, list[float] | None]:
    """Name of a case → some logits that transformers computes; None: it refuses it."""
    return json.loads((FOLDER / f"{family}.json").read_text())


def save(family: str, found: Mapping[str, list[float] | None]) -> None:
    """Store what `load` gives back, a line a case."""
    lines = [f"{json.dumps(name)}: {json.dumps(logits)}" for name, logits in found.items()]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{family}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _each(name: str, *values: Any, refused: bool = False, taken: bool = False) -> tuple[Case, ...]:
    return tuple(Case({name: value}, refused=refused, taken=taken) for value in values)


def _switches(**values: Any) -> Case:
    return Case(values)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2"),
    *("relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
)
FEW = ("gelu", "gelu_new", "relu2", "silu")
FULL, LOCAL = "full_attention", "sliding_attention"
HEAD = ("lm_head.weight", "model.embed_tokens.weight")


def _tying(copy: str = HEAD[0], of: str = HEAD[1], strict: bool = True) -> tuple[Case, ...]:
    """A head that is tied, tied and stored, tied and stored with other values, and its own; `strict`: whether
    transformers refuses what is neither true nor false."""
    stored = [Case({"tie_word_embeddings": True}, {copy: (of, what)}) for what in (EQUAL, OTHER)]
    return (
        *_each("tie_word_embeddings", True, False, ABSENT),
        *_each("tie_word_embeddings", None, "yes", refused=not strict),
        *stored,
    )


def _common(
    activation: str = "hidden_act",
    others: tuple[str, ...] = FEW[:3],
) -> tuple[Case, ...]:
    """Cases of every decoder with gated MLPs."""
    return (
        Case(),
        *_each(activation, *others, "gelu_tanh", None, 3),
        *_each("rms_norm_eps", 0.1, ABSENT, None, "x"),
        *_each("num_key_value_heads", 1, 4, 3, "2"),
        *_each("head_dim", 4, 16, None, 8.0),
        *_each("num_hidden_layers", 1, "3", None, 2.0, True),
        *_each("layer_types", [FULL] * 2, [FULL, "other", FULL], "full_attention", 3),
        *_each("pretraining_tp", 2),
        *_each("a_field_of_tomorrow", 3),
        *_tying(),
    )


BIASES = _each("attention_bias", True, False, None, 1)
MLP_BIASES = _each("mlp_bias", True, None)
UNIFORM = (
    *_each("layer_types", [FULL] * 3),
    Case({"layer_types": [FULL, LOCAL, FULL], "sliding_window": 8}, refused=True),
)
WINDOWS = (
    *_each("use_sliding_window", True, None),
    *_each("max_window_layers", 1, 0, 28),
    Case({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    Case({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    Case({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    Case({"use_sliding_window": True, "sliding_window": 8}),
    Case({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}),
    Case({"use_sliding_window": True, "max_window_layers": 1}),
    Case({"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, LOCAL, LOCAL]}),
    Case({"use_sliding_window": True, "sliding_window": 8, "layer_types": [LOCAL, FULL, LOCAL]}, refused=True),
    Case({"use_sliding_window": False, "sliding_window": 8, "layer_types": [FULL, LOCAL, LOCAL]}),
    Case({"layer_types": [FULL] * 3}),
)
EXPERTS = {"num_experts_per_tok": 2}
BASES: Mapping[str, dict[str, Any]] = {
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
    "qwen2": SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8},
    "smollm3": SIZES | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 4},
    "phi3": SIZES
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 32},
    "mixtral": SIZES
    | EXPERTS
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": SIZES
    | EXPERTS
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
    },
    "olmo2": SIZES | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "olmo3": SIZES
    | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 8},
    "gemma2": SIZES
    | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 8, "sliding_window": 8},
    "gemma3": SIZES
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "bert": {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    | {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_dropout_prob": 0.0},
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 12,
        "patch_size": 4,
        "num_channels": 2,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 6,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
        "decoder_start_token_id": 0,
    },
    "gpt_oss": SIZES
    | EXPERTS
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "max_position_embeddings": 131072,
    },
    "deepseek_v2": SIZES
    | EXPERTS
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
}
BASES |= {
    "deepseek_v3": BASES["deepseek_v2"]
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
}
LATENT = (
    Case(),
    *_each("hidden_act", "gelu"),
    *_each("rms_norm_eps", 0.1, ABSENT, None),
    *_each("num_key_value_heads", ABSENT, None, 2),
    *_each("q_lora_rank", None, 16.0),
    *_each("n_shared_experts", ABSENT, 1, 3, None),
    *_each("first_k_dense_replace", 0, 2, None),
    *_each("head_dim", 99),
    *_each("qk_head_dim", 99),
    *_each("routed_scaling_factor", ABSENT, 3.0, None),
    *_each("num_experts_per_tok", 3, None),
    *_each("norm_topk_prob", ABSENT, False, None),
    *_each("v_head_dim", 6, None),
    *_each("attention_bias", True, refused=True),
    *_tying(),
)
CASES: Mapping[str, tuple[Case, ...]] = {
    "llama": (
        *_common(others=ACTIVATIONS),
        *_each("num_key_value_heads", ABSENT, None),
        *BIASES,
        *MLP_BIASES,
        _switches(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=4),
        *UNIFORM,
        *_each("sliding_window", None),
        *_each("hidden_size", None, "32", 33),
    ),
    "mistral": (
        *_common(),
        *_each("sliding_window", None, 3, "8"),
        *(Case({"layer_types": types, "head_dim": 8}) for types in ([LOCAL] * 3, [FULL] * 3, [FULL, LOCAL, LOCAL])),
        Case({"layer_types": [LOCAL, FULL, LOCAL], "head_dim": 8}, refused=True),
        Case({"layer_types": [LOCAL] * 3}, taken=True),
        *_each("attention_bias", False),
        *_each("num_key_value_heads", 2),
    ),
    "qwen2": (*_common(), *_each("num_key_value_heads", None), *WINDOWS),
    "qwen3": (*_common(), *_each("num_key_value_heads", None), *_each("head_dim", ABSENT), *WINDOWS, *BIASES),
    "smollm3": (
        *(one for one in _common() if "layer_types" not in one.changes),
        *BIASES,
        *MLP_BIASES,
        *_each("num_key_value_heads", None),
        *_each("no_rope_layers", [1, 1, 1, 1], [1, 0, 1, 0], None, [1, 1, 1, 0]),
        *_each("no_rope_layers", [0, 1, 1, 1], refused=True),
        *_each("no_rope_layer_interval", 2, 3, None),
        *_each("layer_types", [FULL] * 4, [FULL] * 3),
        Case({"use_sliding_window": True, "sliding_window": 8}, refused=True),
        *_each("sliding_window", 8),
    ),
    "phi3": (
        *_common(),
        *_each("num_key_value_heads", ABSENT, None),
        *_each("sliding_window", 8, None, "8"),
        *_each("layer_types", [FULL] * 3),
        *_each("resid_pdrop", 0.1),
        *_each("embd_pdrop", 0.1),
    ),
    "mixtral": (
        *_common(),
        *_each("sliding_window", 8, None),
        *_each("num_experts_per_tok", 1, ABSENT, None),
        Case({"num_local_experts": ABSENT, "num_experts": 4}),
        *_each("num_local_experts", 3, None),
        *_each("router_jitter_noise", 0.1),
        *_each("output_router_logits", True),
    ),
    "qwen3_moe": (
        *_common(),
        *BIASES,
        Case({"use_sliding_window": True, "sliding_window": 8}),
        Case({"use_sliding_window": True, "sliding_window": None}),
        *_each("sliding_window", 8),
        *_each("norm_topk_prob", True, None),
        Case({"num_experts": ABSENT, "num_local_experts": 4}),
        *_each("mlp_only_layers", [], None),
        *_each("mlp_only_layers", [1], refused=True),
        *_each("decoder_sparse_step", 2, refused=True),
        *_each("moe_intermediate_size", 8, None),
    ),
    "olmo2": (*_common(), *_each("num_key_value_heads", ABSENT, None), *BIASES, *UNIFORM),
    "olmo3": (
        *(one for one in _common() if "layer_types" not in one.changes and "num_hidden_layers" not in one.changes),
        *BIASES,
        *_each("layer_types", [LOCAL, FULL] * 2 + [LOCAL], [LOCAL] * 5, None, [LOCAL] * 4),
        *_each("layer_types", [FULL] * 5, [FULL, LOCAL] * 2 + [FULL], refused=True),
        *_each("sliding_window", 3, None),
        *_each("sliding_window_pattern", 2),
    ),
    "gemma2": (
        *_common("hidden_activation"),
        *BIASES,
        *_each("head_dim", None),
        *_each("hidden_act", "relu"),
        *_each("query_pre_attn_scalar", 24, ABSENT, None),
        *_each("attn_logit_softcapping", 2.0, None, ABSENT),
        *_each("final_logit_softcapping", 2.0, None, ABSENT),
        *_each("layer_types", [LOCAL, LOCAL, FULL], [LOCAL] * 3, None),
        *_each("layer_types", [FULL] * 3, [FULL, LOCAL, FULL], refused=True),
        *_each("sliding_window", 3, None),
        *_each("sliding_window_pattern", 3),
        *_each("use_bidirectional_attention", None, False),
        *_each("use_bidirectional_attention", True, refused=True),
    ),
    "gemma3": (
        *_common("hidden_activation"),
        *BIASES,
        *_each("query_pre_attn_scalar", 24, ABSENT, None),
        *_each("attn_logit_softcapping", 2.0, None, ABSENT),
        *_each("final_logit_softcapping", 2.0, None, ABSENT),
        *_each("layer_types", [LOCAL, LOCAL, FULL], [LOCAL] * 3, None),
        *_each("layer_types", [FULL] * 3, refused=True),
        *_each("sliding_window", 3, None),
        *_each("sliding_window_pattern", 2, 3),
        *_each("_sliding_window_pattern", 2),
        *_each("use_bidirectional_attention", None, False),
        *_each("use_bidirectional_attention", True, refused=True),
    ),
    "gpt2": (
        Case(),
        *_each("activation_function", *FEW, None, "gelu_tanh"),
        *_each("n_inner", 48, None, "48"),
        *_each("layer_norm_epsilon", 0.1, ABSENT, None),
        *_each("n_head", 2, 3, None),
        Case({"n_embd": ABSENT, "hidden_size": 32}),
        Case({"n_layer": ABSENT, "num_hidden_layers": 2}),
        *_each("scale_attn_weights", False, refused=True),
        *_each("scale_attn_by_inverse_layer_idx", True, refused=True),
        *_each("reorder_and_upcast_attn", True),
        *_each("resid_pdrop", 0, 0.5, None),
        *_tying(of="transformer.wte.weight"),
    ),
    "bert": (
        Case(),
        *_each("hidden_act", *FEW, None, "gelu_tanh"),
        *_each("layer_norm_eps", 0.1, ABSENT, None),
        *_each("type_vocab_size", 3, ABSENT, None),
        *_each("position_embedding_type", "absolute"),
        *_each("is_decoder", True, refused=True),
        *_each("chunk_size_feed_forward", 4),
        *_each("num_attention_heads", 2, 3),
        *_each("tie_word_embeddings", True, None),
        *_each("tie_word_embeddings", False, refused=True),
        Case(stored={"cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight", EQUAL)}),
        Case(
            stored={"cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight", OTHER)}, refused=True
        ),
        Case(stored={"cls.predictions.decoder.bias": ("cls.predictions.bias", OTHER)}, refused=True),
    ),
    "vit": (
        Case(),
        *_each("hidden_act", *FEW, None, "gelu_tanh"),
        *_each("layer_norm_eps", 0.1, ABSENT, None),
        *_each("id2label", ABSENT, None, [1]),
        *_each("id2label", {}, {"0": "a"}, refused=True),
        Case({"id2label": ABSENT, "num_labels": 5}),
        *_each("qkv_bias", False, refused=True),
        *_each("head_dim", 8),
        *_each("head_dim", None, taken=True),
        *_each("head_dim", 4, refused=True),
        *_each("patch_size", 6, None, "4"),
        *_each("image_size", 8),
        *_each("image_size", 13, refused=True),
        *_each("pooler_act", "relu"),
    ),
    "t5": (
        Case(),
        *_each("feed_forward_proj", *FEW, ABSENT, None, 3, "gelu-gated"),
        *_each("feed_forward_proj", *(f"gated-{name}" for name in ("gelu", "silu", "gelu_new", "relu", "nothing"))),
        *_each("num_decoder_layers", 3, None),
        *_each("d_kv", 8, None),
        Case({"d_model": ABSENT, "hidden_size": 32}),
        Case({"num_heads": ABSENT, "num_attention_heads": 4}),
        *_each("layer_norm_epsilon", 0.1, ABSENT, None),
        *_each("relative_attention_max_distance", 10, ABSENT),
        *_each("scale_decoder_outputs", True, False),
        *_each("dense_act_fn", "silu", refused=True),
        *_each("is_gated_act", True, refused=True),
        *_tying(of="shared.weight", strict=False),
        *(Case({"tie_word_embeddings": False}, {HEAD[0]: ("shared.weight", what)}) for what in (EQUAL, OTHER)),
        Case(stored={"encoder.embed_tokens.weight": ("shared.weight", EQUAL)}),
        Case(stored={"decoder.embed_tokens.weight": ("shared.weight", OTHER)}, refused=True),
    ),
    "gpt_oss": (
        Case(),
        *_each("hidden_act", "gelu"),
        *_each("rms_norm_eps", 0.1, ABSENT, None),
        *_each("num_key_value_heads", 4, 3),
        *_each("head_dim", 16),
        *_each("num_experts_per_tok", 1, ABSENT, None),
        Case({"num_local_experts": ABSENT, "num_experts": 4}),
        *_each("swiglu_limit", 0.5, None),
        *_each("swiglu_alpha", 1.0, None),
        *_each("layer_types", [LOCAL, FULL] * 2, None, [LOCAL, FULL]),
        *_each("layer_types", [FULL, LOCAL] * 2, refused=True),
        *_each("num_hidden_layers", 3, refused=True),
        *_each("sliding_window", 3, None),
        *_each("attention_bias", False, refused=True),
        *_tying(),
    ),
    "deepseek_v2": (
        *LATENT,
        *_each("topk_method", ABSENT, "greedy", "noaux_tc"),
        Case({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        Case({"topk_method": "group_limited_greedy", "n_group": ABSENT}),
        *_each("n_group", 4),
        *_each("norm_topk_prob", True, refused=True),
        *_each("mlp_bias", True, refused=True),
    ),
    "deepseek_v3": (
        *LATENT,
        *_each("rope_interleave", ABSENT, False, None),
        *_each("n_group", 2, 1, None),
        *_each("topk_group", 1, None),
        *_each("norm_topk_prob", True),
    ),
}
