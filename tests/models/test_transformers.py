"""Each family against `transformers`: its weights put where a table says, its logits, and its gradients by name.

A further family is a config in fixtures/make.py and a table here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from flax import nnx
from reference import Reference, decoded, least_norm, load, relative_error, sketch, types, weights

from axon.nn import (
    ClampedSwiGLU,
    Inputs,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Routing,
    YarnScaling,
    cross_entropy,
    parameters,
    variables,
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

Row = tuple[str | tuple[str, ...], str] | tuple[tuple[str, ...], str, tuple[str, ...]]
"""Our path, or the paths of what they store as one, and the pattern from their array to ours.

Where there are several paths, the pattern's right side begins with an axis `parts` over them; or it has an axis `width`
in which they follow each other, by their names there, which come third.
"""


def every_layer(config: dict[str, Any]) -> dict[str, Sequence[int]]:
    """One kind of block."""
    return {"layers/block": range(config["num_hidden_layers"])}


def next_token(model: nnx.Module, reference: Reference) -> tuple[Any, Any]:
    """The mean next token's negative log-likelihood, and the logits of each token."""
    tokens = reference.tokens
    batch, seq = tokens.shape
    counted = np.broadcast_to(np.arange(seq) < seq - 1, tokens.shape) / np.float32(batch * (seq - 1))
    x, *_ = model.hidden(at_their_places(tokens))
    loss, _ = cross_entropy(x, model.output, np.roll(tokens, -1, axis=1), counted)
    return loss, model.output.logits(x)


def of_both_sides(model: nnx.Module, reference: Reference) -> tuple[Any, Any]:
    """The same of an encoder's logits, whose tokens are of two types."""
    x, _ = model.hidden(at_their_places(reference.tokens), types(reference.tokens))
    logits = model.masked_logits(x, "seq")
    return mean_nll(logits, reference.tokens), logits


def encoded_and_decoded(model: nnx.Module, reference: Reference) -> tuple[Any, Any]:
    """The same of a decoder's logits, beside an encoder."""
    encoded, _ = model.encode(at_their_places(reference.tokens))
    x, _ = model.decode(at_their_places(decoded(reference.tokens)), encoded, None)
    logits = model.output.logits(x)
    return mean_nll(logits, reference.tokens), logits


def at_their_places(tokens: np.ndarray) -> Inputs:
    return Inputs(tokens, np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape))


def mean_nll(logits: Any, tokens: np.ndarray) -> Any:
    """Of the token after each, in nats."""
    found = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(found, tokens[:, 1 : logits.shape[1], None], axis=2))


@dataclass(frozen=True)
class Table:
    """How a family's parameters are named.

    Args:
        build: from their config to ours. outer: names outside of the blocks; block: names within one, after `prefix`,
            or that of its kind, and the layer's number. kinds: from their config to our path of each kind of block, and
            the numbers of the layers that are stacked there. of_kind: by that path, further names within its blocks.
        evaluate: of our module and the fixture, the loss and the logits.
    """

    build: Callable[[dict[str, Any]], Any]
    outer: Mapping[str, Row]
    block: dict[str, Row]
    prefix: str | Mapping[str, str] = "model.layers"
    kinds: Callable[[dict[str, Any]], Mapping[str, Sequence[int]]] = every_layer
    of_kind: Mapping[str, dict[str, Row]] = field(default_factory=dict)
    evaluate: Callable[[Any, Reference], tuple[Any, Any]] = next_token


def rope_of(described: dict[str, Any], positions: int = 0) -> Rope:
    """`positions`: how many the model has, which longrope is told of here alone."""
    fraction = described.get("partial_rotary_factor", 1.0)
    return Rope(described["rope_theta"], scaling_of(described, positions), fraction)


def scaling_of(described: dict[str, Any], positions: int) -> Any:
    original = described.get("original_max_position_embeddings")
    match described["rope_type"]:
        case "default":
            return None
        case "linear":
            return LinearScaling(described["factor"])
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            return Llama3Scaling(*(described[name] for name in names), original)
        case "longrope":
            short, long = (tuple(described[name]) for name in ("short_factor", "long_factor"))
            return LongRopeScaling(short, long, original, positions / original)
        case "yarn":
            fast, slow, truncate = (described[name] for name in ("beta_fast", "beta_slow", "truncate"))
            factor = described["attention_factor"]
            return YarnScaling(described["factor"], original, fast, slow, factor, truncate)
    raise NotImplementedError(described["rope_type"])


def llama(config: dict[str, Any]) -> Llama:
    return Llama(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        head_dim=config.get("head_dim"),
        rope=rope_of(config["rope_parameters"], config["max_position_embeddings"]),
        window=config.get("sliding_window"),
        norm_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
    )


def smollm3(config: dict[str, Any]) -> Llama:
    rotates = config["no_rope_layers"]
    return replace(llama(config), nope_every=rotates.index(0) + 1)


def mixtral(config: dict[str, Any]) -> Mixtral:
    experts = config["num_local_experts"]
    return Mixtral(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config.get("moe_intermediate_size", config["intermediate_size"]),
        routing=Routing(experts, config["num_experts_per_tok"], normalise=config.get("norm_topk_prob", True)),
        head_dim=config.get("head_dim"),
        rope=Rope(config["rope_parameters"]["rope_theta"]),
        window=config.get("sliding_window"),
        norm_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
    )


def gpt2(config: dict[str, Any]) -> GPT2:
    return GPT2(
        vocab=config["vocab_size"],
        embed=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        mlp=config["n_inner"],
        positions=config["n_positions"],
        norm_eps=config["layer_norm_epsilon"],
        dropout=0.0,
    )


def bert(config: dict[str, Any]) -> Bert:
    return Bert(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        mlp=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        types=config["type_vocab_size"],
        norm_eps=config["layer_norm_eps"],
        dropout=config["hidden_dropout_prob"],
    )


def t5(config: dict[str, Any]) -> T5:
    return T5(
        vocab=config["vocab_size"],
        embed=config["d_model"],
        encoder_layers=config["num_layers"],
        decoder_layers=config["num_decoder_layers"],
        heads=config["num_heads"],
        head_dim=config["d_kv"],
        mlp=config["d_ff"],
        buckets=config["relative_attention_num_buckets"],
        max_distance=config["relative_attention_max_distance"],
        gated=config["is_gated_act"],
        tied=config["scale_decoder_outputs"],
        norm_eps=config["layer_norm_epsilon"],
        dropout=config["dropout_rate"],
    )


def olmo(config: dict[str, Any]) -> Olmo:
    ropes, window = config["rope_parameters"], config.get("sliding_window")
    rope = rope_of(ropes.get("full_attention", ropes))
    return Olmo(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        window=window,
        local_rope=rope if window is None else rope_of(ropes["sliding_attention"]),
        rope=rope,
        norm_eps=config["rms_norm_eps"],
    )


def gemma(config: dict[str, Any]) -> Gemma:
    ropes, kinds = config["rope_parameters"], config["layer_types"]
    return Gemma(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        head_dim=config["head_dim"],
        window=config["sliding_window"],
        local_layers=kinds.index("full_attention"),
        local_rope=rope_of(ropes.get("sliding_attention", ropes)),
        rope=rope_of(ropes.get("full_attention", ropes)),
        query_pre_attn_scalar=config["query_pre_attn_scalar"],
        soft_cap=config.get("attn_logit_softcapping"),
        logit_soft_cap=config.get("final_logit_softcapping"),
        norm_eps=config["rms_norm_eps"],
    )


def gpt_oss(config: dict[str, Any]) -> GptOss:
    rope = config["rope_parameters"]
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    return GptOss(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        head_dim=config["head_dim"],
        routing=Routing(config["num_local_experts"], config["num_experts_per_tok"]),
        activation=ClampedSwiGLU(config["swiglu_alpha"], config["swiglu_limit"]),
        window=config["sliding_window"],
        rope=Rope(rope["rope_theta"], YarnScaling(*(rope[name] for name in names), truncate=rope["truncate"])),
        norm_eps=config["rms_norm_eps"],
    )


def deepseek_routing(config: dict[str, Any]) -> Routing:
    experts, chosen, scale = (config[n] for n in ("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"))
    if config["model_type"] == "deepseek_v2":
        grouped = config["topk_method"] == "group_limited_greedy"
        groups = {"groups": config["n_group"], "kept_groups": config["topk_group"], "group_best": 1} if grouped else {}
        return Routing(experts, chosen, normalise=False, scale=scale, **groups)
    groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]}
    return Routing(experts, chosen, "sigmoid", config["norm_topk_prob"], scale, bias_rate=0.001, **groups)


def deepseek(config: dict[str, Any]) -> DeepSeek:
    rope, scaling = config["rope_parameters"], None
    if rope["rope_type"] == "yarn":
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        scaling = YarnScaling(
            *(rope[name] for name in names), mscale=rope["mscale"], mscale_all_dim=rope["mscale_all_dim"]
        )
    return DeepSeek(
        vocab=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        first_dense=config["first_k_dense_replace"],
        heads=config["num_attention_heads"],
        mlp=config["intermediate_size"],
        expert_mlp=config["moe_intermediate_size"],
        routing=deepseek_routing(config),
        shared=config["moe_intermediate_size"] * config["n_shared_experts"],
        q_latent=config["q_lora_rank"],
        kv_latent=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        rope=Rope(rope["rope_theta"], scaling),
        interleaved=config.get("rope_interleave", True),
        norm_eps=config["rms_norm_eps"],
    )


def kinds_of(build: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Mapping[str, Sequence[int]]]:
    """Each kind of block, and its logical layers, as the model that `build` describes says them."""

    def kinds(config: dict[str, Any]) -> dict[str, Sequence[int]]:
        blocks = build(config).build().layers.blocks
        return {f"layers/{kind}": block.attention_norm.scale.layers for kind, block in blocks.items()}

    return kinds


TIED = {
    "model.embed_tokens.weight": ("embedding/table", "vocab embed -> vocab embed"),
    "model.norm.weight": ("norm/scale", "embed -> embed"),
}
UNTIED = TIED | {"lm_head.weight": ("head", "vocab embed -> embed vocab")}
LLAMA = {
    "input_layernorm.weight": ("attention_norm/scale", "embed -> embed"),
    "self_attn.q_proj.weight": ("attention/query", "(heads head_dim) embed -> embed heads head_dim"),
    "self_attn.k_proj.weight": ("attention/key", "(kv_heads head_dim) embed -> embed kv_heads head_dim"),
    "self_attn.v_proj.weight": ("attention/value", "(kv_heads head_dim) embed -> embed kv_heads head_dim"),
    "self_attn.o_proj.weight": ("attention/out", "embed (heads head_dim) -> heads head_dim embed"),
    "post_attention_layernorm.weight": ("mlp_norm/scale", "embed -> embed"),
    "mlp.gate_proj.weight": ("mlp/gate", "mlp embed -> embed mlp"),
    "mlp.up_proj.weight": ("mlp/up", "mlp embed -> embed mlp"),
    "mlp.down_proj.weight": ("mlp/down", "embed mlp -> mlp embed"),
}
ATTENTION = {name: row for name, row in LLAMA.items() if "self_attn" in name or name.startswith("input")}
EXPERTS = {
    "mlp.gate.weight": ("moe/router/matrix", "experts embed -> embed experts"),
    "mlp.experts.gate_up_proj": (("moe/gate", "moe/up"), "experts (parts width) embed -> parts experts embed width"),
    "mlp.experts.down_proj": ("moe/down", "experts embed width -> experts width embed"),
}
MOE_NORM = {"post_attention_layernorm.weight": ("moe_norm/scale", "embed -> embed")}
MIXTRAL = ATTENTION | MOE_NORM | EXPERTS
BIAS = {
    "self_attn.q_proj.bias": ("attention/query_bias", "(heads head_dim) -> heads head_dim"),
    "self_attn.k_proj.bias": ("attention/key_bias", "(kv_heads head_dim) -> kv_heads head_dim"),
    "self_attn.v_proj.bias": ("attention/value_bias", "(kv_heads head_dim) -> kv_heads head_dim"),
}
QK_NORM = {
    "self_attn.q_norm.weight": ("attention/query_norm/scale", "head_dim -> head_dim"),
    "self_attn.k_norm.weight": ("attention/key_norm/scale", "head_dim -> head_dim"),
}
JOINED = {
    "self_attn.qkv_proj.weight": (
        ("attention/query", "attention/key", "attention/value"),
        "(width head_dim) embed -> embed width head_dim",
        ("heads", "kv_heads", "kv_heads"),
    ),
    "mlp.gate_up_proj.weight": (("mlp/gate", "mlp/up"), "(parts mlp) embed -> parts embed mlp"),
}
PHI = JOINED | {name: row for name, row in LLAMA.items() if not re.search("[qkv]_proj|gate_proj|up_proj", name)}
AFTER = {
    "post_attention_layernorm.weight": ("attention_norm/scale", "embed -> embed"),
    "post_feedforward_layernorm.weight": ("mlp_norm/scale", "embed -> embed"),
}
QK_NORM_OF_ALL = {
    "self_attn.q_norm.weight": ("attention/query_norm/scale", "(heads head_dim) -> heads head_dim"),
    "self_attn.k_norm.weight": ("attention/key_norm/scale", "(kv_heads head_dim) -> kv_heads head_dim"),
}
OLMO = {name: row for name, row in LLAMA.items() if "layernorm" not in name} | AFTER | QK_NORM_OF_ALL
OUT_BIAS = {"self_attn.o_proj.bias": ("attention/out_bias", "embed -> embed")}
SINKS = {"self_attn.sinks": ("attention/sinks", "heads -> heads")}
BIASED_EXPERTS = {
    "mlp.router.weight": ("moe/router/matrix", "experts embed -> embed experts"),
    "mlp.router.bias": ("moe/router/logit_bias", "experts -> experts"),
    "mlp.experts.gate_up_proj": (("moe/gate", "moe/up"), "experts embed (width parts) -> parts experts embed width"),
    "mlp.experts.gate_up_proj_bias": (("moe/gate_bias", "moe/up_bias"), "experts (width parts) -> parts experts width"),
    "mlp.experts.down_proj": ("moe/down", "experts width embed -> experts width embed"),
    "mlp.experts.down_proj_bias": ("moe/down_bias", "experts embed -> experts embed"),
}
FOUR_NORMS = {
    "post_attention_layernorm.weight": ("attention_post_norm/scale", "embed -> embed"),
    "pre_feedforward_layernorm.weight": ("mlp_norm/scale", "embed -> embed"),
    "post_feedforward_layernorm.weight": ("mlp_post_norm/scale", "embed -> embed"),
}
DENSE = {name: row for name, row in LLAMA.items() if name not in ATTENTION}
SHARED_EXPERT = {
    "mlp.shared_experts.gate_proj.weight": ("moe/shared/gate", "width embed -> embed width"),
    "mlp.shared_experts.up_proj.weight": ("moe/shared/up", "width embed -> embed width"),
    "mlp.shared_experts.down_proj.weight": ("moe/shared/down", "embed width -> width embed"),
}
LATENT = {
    "input_layernorm.weight": ("attention_norm/scale", "embed -> embed"),
    "self_attn.kv_a_proj_with_mqa.weight": (
        ("attention/kv_down", "attention/key_rope"),
        "width embed -> embed width",
        ("kv_latent", "rope_dim"),
    ),
    "self_attn.kv_a_layernorm.weight": ("attention/kv_norm/scale", "kv_latent -> kv_latent"),
    "self_attn.kv_b_proj.weight": (
        ("attention/key", "attention/value"),
        "(heads width) kv_latent -> kv_latent heads width",
        ("nope_dim", "value_dim"),
    ),
    "self_attn.o_proj.weight": ("attention/out", "embed (heads value_dim) -> heads value_dim embed"),
}
QUERIES = (("attention/query", "attention/query_rope"), "(heads width) inputs -> inputs heads width")
QUERY_PARTS = ("nope_dim", "rope_dim")
LATENT_QUERIES = {
    "self_attn.q_a_proj.weight": ("attention/query_down", "q_latent embed -> embed q_latent"),
    "self_attn.q_a_layernorm.weight": ("attention/query_norm/scale", "q_latent -> q_latent"),
    "self_attn.q_b_proj.weight": (*QUERIES, QUERY_PARTS),
}
PLAIN_QUERIES = {"self_attn.q_proj.weight": (*QUERIES, QUERY_PARTS)}
FEED_FORWARD = {"layers/dense": DENSE, "layers/experts": MOE_NORM | EXPERTS | SHARED_EXPERT}
BALANCE = {"mlp.gate.e_score_correction_bias": ("moe/router/bias", "experts -> experts")}
QKV = ("attention/query", "attention/key", "attention/value")
QKV_BIAS = ("attention/query_bias", "attention/key_bias", "attention/value_bias")


def with_bias(theirs: str, ours: str, pattern: str) -> dict[str, Row]:
    """A linear layer of theirs, `out in`, with its bias; `pattern`: how the matrix becomes ours."""
    out = pattern.split(" -> ")[0].rpartition(" ")[0] if pattern[0] == "(" else pattern.split()[0]
    names = out.strip("()")
    return {f"{theirs}.weight": (ours, pattern), f"{theirs}.bias": (f"{ours}_bias", f"{out} -> {names}")}


def layer_norm(theirs: str, ours: str) -> dict[str, Row]:
    return {
        f"{theirs}.weight": (f"{ours}/scale", "embed -> embed"),
        f"{theirs}.bias": (f"{ours}/bias", "embed -> embed"),
    }


def attention_with_bias(query: str, key: str, value: str, out: str) -> dict[str, Row]:
    heads, kv_heads = (f"({heads} head_dim) embed -> embed {heads} head_dim" for heads in ("heads", "kv_heads"))
    rows = with_bias(query, "attention/query", heads) | with_bias(key, "attention/key", kv_heads)
    out_rows = with_bias(out, "attention/out", "embed (heads head_dim) -> heads head_dim embed")
    return rows | with_bias(value, "attention/value", kv_heads) | out_rows


def mlp_with_bias(up: str, down: str) -> dict[str, Row]:
    return with_bias(up, "mlp/up", "mlp embed -> embed mlp") | with_bias(down, "mlp/down", "embed mlp -> mlp embed")


BERT = {
    "bert.embeddings.word_embeddings.weight": ("embedding/table", "vocab embed -> vocab embed"),
    "bert.embeddings.position_embeddings.weight": ("positions/table", "positions embed -> positions embed"),
    "bert.embeddings.token_type_embeddings.weight": ("types/table", "types embed -> types embed"),
    **layer_norm("bert.embeddings.LayerNorm", "embedding_norm"),
    **with_bias("cls.predictions.transform.dense", "transform", "embed_out embed -> embed embed_out"),
    **layer_norm("cls.predictions.transform.LayerNorm", "transform_norm"),
    "cls.predictions.bias": ("output_bias", "vocab -> vocab"),
}
BERT_BLOCK = (
    attention_with_bias(*(f"attention.self.{part}" for part in ("query", "key", "value")), "attention.output.dense")
    | layer_norm("attention.output.LayerNorm", "attention_norm")
    | mlp_with_bias("intermediate.dense", "output.dense")
    | layer_norm("output.LayerNorm", "mlp_norm")
)


def t5_stack(stack: str) -> dict[str, Row]:
    return {
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (
            f"{stack}/bias/table",
            "buckets heads -> heads buckets",
        ),
        f"{stack}.final_layer_norm.weight": (f"{stack}/norm/scale", "embed -> embed"),
    }


def t5_attention(theirs: str, ours: str) -> dict[str, Row]:
    pattern = "(heads head_dim) embed -> embed heads head_dim"
    names = {"q": "query", "k": "key", "v": "value"}
    rows = {f"{theirs}.{name}.weight": (f"{ours}/{path}", pattern) for name, path in names.items()}
    return rows | {f"{theirs}.o.weight": (f"{ours}/out", "embed (heads head_dim) -> heads head_dim embed")}


def t5_mlp(layer: int, **names: str) -> dict[str, Row]:
    rows = {f"layer.{layer}.layer_norm.weight": ("mlp_norm/scale", "embed -> embed")}
    for name, path in names.items():
        pattern = "embed mlp -> mlp embed" if path == "down" else "mlp embed -> embed mlp"
        rows[f"layer.{layer}.DenseReluDense.{name}.weight"] = (f"mlp/{path}", pattern)
    return rows


def t5_table(outer: dict[str, Row], **mlp: str) -> Table:
    layers = lambda config: {  # noqa: E731
        "encoder/layers/encoder": range(config["num_layers"]),
        "decoder/layers/decoder": range(config["num_decoder_layers"]),
    }
    cross = t5_attention("layer.1.EncDecAttention", "cross") | {
        "layer.1.layer_norm.weight": ("cross_norm/scale", "embed -> embed")
    }
    return Table(
        t5,
        {"shared.weight": ("embedding/table", "vocab embed -> vocab embed")}
        | t5_stack("encoder")
        | t5_stack("decoder")
        | outer,
        t5_attention("layer.0.SelfAttention", "attention")
        | {"layer.0.layer_norm.weight": ("attention_norm/scale", "embed -> embed")},
        {"encoder/layers/encoder": "encoder.block", "decoder/layers/decoder": "decoder.block"},
        layers,
        {"encoder/layers/encoder": t5_mlp(1, **mlp), "decoder/layers/decoder": cross | t5_mlp(2, **mlp)},
        encoded_and_decoded,
    )


TABLES = {
    "t5": t5_table({}, wi="up", wo="down"),
    "t5_v1_1": t5_table({"lm_head.weight": ("head", "vocab embed -> embed vocab")}, wi_0="gate", wi_1="up", wo="down"),
    "bert": Table(bert, BERT, BERT_BLOCK, "bert.encoder.layer", evaluate=of_both_sides),
    "llama31": Table(llama, UNTIED, LLAMA),
    "mistral": Table(llama, UNTIED, LLAMA),
    "qwen2": Table(lambda config: replace(llama(config), bias=True), TIED, LLAMA | BIAS),
    "qwen3": Table(lambda config: replace(llama(config), qk_norm=True), UNTIED, LLAMA | QK_NORM),
    "phi3": Table(llama, UNTIED, PHI),
    "phi4_mini": Table(llama, TIED, PHI),
    "phi4_mini_short": Table(llama, TIED, PHI),
    "smollm3": Table(smollm3, TIED, LLAMA, kinds=kinds_of(smollm3)),
    "olmo2": Table(olmo, UNTIED, OLMO, kinds=kinds_of(olmo)),
    "olmo3": Table(olmo, UNTIED, OLMO, kinds=kinds_of(olmo)),
    "gemma2": Table(gemma, TIED, LLAMA | FOUR_NORMS, kinds=kinds_of(gemma)),
    "gemma3": Table(
        lambda config: replace(gemma(config), qk_norm=True),
        TIED,
        LLAMA | FOUR_NORMS | QK_NORM,
        kinds=kinds_of(gemma),
    ),
    "mixtral": Table(mixtral, UNTIED, MIXTRAL),
    "qwen3_moe": Table(lambda config: replace(mixtral(config), qk_norm=True), UNTIED, MIXTRAL | QK_NORM),
    "gpt_oss": Table(
        gpt_oss,
        UNTIED,
        ATTENTION | BIAS | OUT_BIAS | SINKS | MOE_NORM | BIASED_EXPERTS,
        kinds=kinds_of(gpt_oss),
    ),
    "deepseek_v2": Table(deepseek, UNTIED, LATENT | LATENT_QUERIES, kinds=kinds_of(deepseek), of_kind=FEED_FORWARD),
    "deepseek_v2_lite": Table(deepseek, UNTIED, LATENT | PLAIN_QUERIES, kinds=kinds_of(deepseek), of_kind=FEED_FORWARD),
    "deepseek_v3": Table(
        deepseek,
        UNTIED,
        LATENT | LATENT_QUERIES,
        kinds=kinds_of(deepseek),
        of_kind=FEED_FORWARD | {"layers/experts": FEED_FORWARD["layers/experts"] | BALANCE},
    ),
    "gpt2": Table(
        gpt2,
        {
            "transformer.wte.weight": ("embedding/table", "vocab embed -> vocab embed"),
            "transformer.wpe.weight": ("positions/table", "positions embed -> positions embed"),
            "transformer.ln_f.weight": ("norm/scale", "embed -> embed"),
            "transformer.ln_f.bias": ("norm/bias", "embed -> embed"),
        },
        {
            "ln_1.weight": ("attention_norm/scale", "embed -> embed"),
            "ln_1.bias": ("attention_norm/bias", "embed -> embed"),
            "attn.c_attn.weight": (QKV, "embed (parts heads head_dim) -> parts embed heads head_dim"),
            "attn.c_attn.bias": (QKV_BIAS, "(parts heads head_dim) -> parts heads head_dim"),
            "attn.c_proj.weight": ("attention/out", "(heads head_dim) embed -> heads head_dim embed"),
            "attn.c_proj.bias": ("attention/out_bias", "embed -> embed"),
            "ln_2.weight": ("mlp_norm/scale", "embed -> embed"),
            "ln_2.bias": ("mlp_norm/bias", "embed -> embed"),
            "mlp.c_fc.weight": ("mlp/up", "embed mlp -> embed mlp"),
            "mlp.c_fc.bias": ("mlp/up_bias", "mlp -> mlp"),
            "mlp.c_proj.weight": ("mlp/down", "mlp embed -> mlp embed"),
            "mlp.c_proj.bias": ("mlp/down_bias", "embed -> embed"),
        },
        prefix="transformer.h",
        kinds=lambda config: {"layers/block": range(config["n_layer"])},
    ),
}


def ours(table: Table, config: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Path → value, each of `theirs` used once."""
    dims, left, flat = table.build(config).dims, dict(theirs), {}
    for name, row in table.outer.items():
        flat |= placed_by(row, left.pop(name), dims)
    for kind, layers in table.kinds(config).items():
        prefix = table.prefix if isinstance(table.prefix, str) else table.prefix[kind]
        for name, row in (table.block | table.of_kind.get(kind, {})).items():
            found = [placed_by(row, left.pop(f"{prefix}.{layer}.{name}"), dims) for layer in layers]
            flat |= {f"{kind}/{path}": jnp.stack([one[path] for one in found]) for path in found[0]}
    assert not left
    return flat


def placed_by(row: Row, value: Any, dims: Mapping[str, int]) -> dict[str, Any]:
    """Path → value of one of their parameters."""
    paths, pattern, *joined = row
    dims = {**dims, "parts": len(paths)}
    value = rearrange(value, pattern, **{name: dims[name] for name in re.findall(r"\w+", pattern) if name in dims})
    if joined:
        axis = pattern.split("->")[1].split().index("width")
        value = jnp.split(value, np.cumsum([dims[name] for name in joined[0][:-1]]), axis=axis)
    return {paths: value} if isinstance(paths, str) else dict(zip(paths, value, strict=True))


@pytest.mark.few(family=("gpt2", "llama31", "gemma2", "gpt_oss", "deepseek_v3"))
@pytest.mark.parametrize("family", TABLES)
def test_logits_loss_and_gradients_are_those_of_transformers(family, placed, compiled, bind):
    table, reference = TABLES[family], load(family)
    module, theirs = table.build(reference.config).build(), weights(family, reference.shapes | reference.buffers)

    def run(theirs):
        flat = ours(table, reference.config, theirs)
        found = {path: value.shape for path, value in flat.items() if path not in variables(module)}
        assert found == {path: spec.shape for path, spec in parameters(module).items()}
        return table.evaluate(bind(module, nested(flat)), reference)

    (loss, logits), gradients = compiled(placed(), jax.value_and_grad(run, has_aux=True), theirs)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, reference.loss, rtol=1e-5)
    least = least_norm(reference.gradients)
    errors = {
        name: relative_error(sketch(family, name, np.asarray(gradients[name])), stored, least)
        for name, stored in reference.gradients.items()
    }
    assert not any(np.any(gradients[name]) for name in reference.buffers)
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.few(family=("llama31", "gemma2"))
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama31", {"rope": Rope(500.0)}),
        ("mistral", {"window": None}),
        ("qwen3", {"norm_eps": 1e-2}),
        ("gemma2", {"soft_cap": None}),
        ("gemma2", {"query_pre_attn_scalar": None}),
        ("gemma3", {"rope": Rope(1e6)}),
        ("phi4_mini", {"rope": Rope(100.0, fraction=0.75)}),
        ("phi4_mini", {"rope": Rope(100.0)}),
        ("olmo3", {"rope": Rope(1000.0)}),
        ("olmo3", {"window": 9}),
        ("qwen3_moe", {"routing": Routing(8, 3, normalise=False)}),
        ("gpt_oss", {"rope": Rope(1000.0)}),
        ("deepseek_v3", {"rope": Rope(1000.0, YarnScaling(40.0, 64, mscale_all_dim=1.0))}),
        ("deepseek_v2_lite", {"interleaved": False}),
        ("deepseek_v2", {"routing": Routing(12, 3, normalise=False, scale=4.0)}),
        (
            "deepseek_v3",
            {"routing": Routing(12, 3, "sigmoid", scale=2.5, groups=3, kept_groups=2, group_best=1, bias_rate=1.0)},
        ),
        ("gpt_oss", {"activation": ClampedSwiGLU()}),
    ],
)
def test_a_field_that_is_not_theirs_is_seen(family, change, placed, compiled, bind):
    table, reference = TABLES[family], load(family)
    module = replace(table.build(reference.config), **change).build()
    values = nested(ours(table, reference.config, weights(family, reference.shapes | reference.buffers)))
    _, logits = compiled(placed(), lambda values: table.evaluate(bind(module, values), reference), values)
    assert np.abs(logits - reference.logits).max() > 1e-2


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    return nnx.traversals.unflatten_mapping({tuple(path.split("/")): value for path, value in flat.items()})
