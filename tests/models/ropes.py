"""A table of what config.jsons say of rotary frequencies, and what `transformers` computes from each.

As reference.py: no torch and no JAX; fixtures/make.py stores what it finds in fixtures/ropes.npz.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "fixtures" / "ropes.npz"
LENGTHS = 12, 24
"""Of sequences: below and above `MOST` positions."""
MOST = 16
DIRECTIONS = 3
"""Random projections that are stored of cosines and sines."""

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MOST,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8} | BOTH),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 8} | BOTH),
    "gemma3_text": ("Gemma3ForCausalLM", {"head_dim": 8} | BOTH),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", BOTH),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
}
"""`model_type` → architecture, and what a config.json has of it besides."""
TWO = ("gemma3_text", "olmo3")
"""Those with frequencies for each kind of layer."""

THETA = {"rope_theta": 100.0}
KINDS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 2.0, "beta_slow": 0.5},
    "longrope": {
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [1.5, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": 14,
        "factor": 2.5,
    },
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}
"""`rope_type` → all fields that it must have, and those that it may."""
MORE: Mapping[str, list[dict[str, Any]]] = {
    "yarn": [
        {"attention_factor": 1.3},
        {"attention_factor": None},
        {"truncate": False},
        {"truncate": None},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": None, "mscale_all_dim": 0.5},
        {"mscale": 0.0, "mscale_all_dim": 0.5},
        {"mscale": 0.7, "mscale_all_dim": 0.4, "attention_factor": 1.3},
        {"factor": 1.0},
        {"factor": 0.5, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"factor": None, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"beta_fast": 0},
        {"beta_slow": 0},
        {"original_max_position_embeddings": 4096, "rope_theta": 3.0},
    ],
    "longrope": [
        {"attention_factor": 1.3},
        {"attention_factor": None},
        {"factor": 0.5},
        {"factor": 1.0},
        {"short_factor": [1.0, 2.0]},
        {"long_factor": 2.0},
        {"original_max_position_embeddings": 30},
    ],
    "proportional": [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.6}],
    "linear": [{"factor": 0.5}, {"factor": 1}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"unheard_of": 1}],
    "dynamic": [{"factor": 1.0}, {"original_max_position_embeddings": 8}],
    "default": [{"factor": 4.0}, {"mscale_all_dim": 0.7}],
}
"""Fields that a kind may have besides, and other values."""
Case = dict[str, Any]
ABSENT = object()


def cases(family: str) -> Iterator[tuple[str, Case]]:
    """Name → config.json."""
    architecture, own = FAMILIES[family]
    whole = BASE | own | {"model_type": family, "architectures": [architecture]}
    for name, change in _changes():
        yield name, {key: value for key, value in (whole | change).items() if value is not ABSENT}


def _changes() -> Iterator[tuple[str, Case]]:
    yield from _places()
    for kind, fields in KINDS.items():
        rope = {"rope_type": kind, **THETA, **fields}
        for more in MORE.get(kind, []):
            yield f"{kind} {_short(more)}", {"rope_parameters": rope | more}
        for name in fields:
            without = {key: value for key, value in rope.items() if key != name}
            yield f"{kind} without {name}", {"rope_parameters": without}
            yield f"{kind} {name} null", {"rope_parameters": rope | {name: None}}
            yield f"{kind} {name} at the top", {"rope_parameters": without, name: fields[name]}
            yield f"{kind} {name} a string", {"rope_parameters": rope | {name: "4"}}
        yield from _of_kind(kind, rope)
        yield from _nested(kind, rope)


def _of_kind(kind: str, rope: Case) -> Iterator[tuple[str, Case]]:
    """Fields that any kind may have, everywhere."""
    plain = {key: value for key, value in rope.items() if key != "rope_theta"}
    yield f"{kind} in rope_parameters", {"rope_parameters": rope}
    yield f"{kind} in rope_scaling", {"rope_scaling": plain, **THETA}
    yield f"{kind} by type", {"rope_scaling": {"type": kind, **plain, "rope_type": kind} | THETA}
    old = {key: value for key, value in plain.items() if key != "rope_type"}
    yield f"{kind} by type alone", {"rope_scaling": {"type": kind, **old}, **THETA}
    yield f"{kind} with rope_theta at both places", {"rope_parameters": rope, "rope_theta": 50.0}
    yield f"{kind} without rope_theta", {"rope_scaling": plain}
    yield f"{kind} in rope_parameters, rope_theta at the top", {"rope_parameters": plain, **THETA}
    yield f"{kind} with rope_theta null", {"rope_parameters": rope | {"rope_theta": None}}
    yield f"{kind} with rope_theta null at the top", {"rope_scaling": plain, "rope_theta": None}
    yield f"{kind} over rope_parameters", {"rope_scaling": rope, "rope_parameters": {"rope_type": "default", **THETA}}
    yield f"{kind} under rope_scaling", {"rope_parameters": rope, "rope_scaling": {"rope_type": "linear", "factor": 2}}
    original = "original_max_position_embeddings"
    for value in (8, None):
        yield f"{kind} with {original} {value} at the top", {"rope_parameters": rope, original: value}
    inside = {key: value for key, value in rope.items() if key != original}
    yield f"{kind} with {original} 8 at the top alone", {"rope_parameters": inside, original: 8}
    for value in (0.5, 1.0, None):
        place = {"partial_rotary_factor": value}
        yield f"{kind} with {_short(place)}", {"rope_parameters": rope | place}
        yield f"{kind} with {_short(place)} at the top", {"rope_parameters": rope} | place
        without = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        yield f"{kind} with {_short(place)} at the top alone", {"rope_parameters": without} | place
    yield f"{kind} with head_dim null", {"rope_parameters": rope, "head_dim": None}
    yield f"{kind} without head_dim", {"rope_parameters": rope, "head_dim": ABSENT}
    yield f"{kind} without max_position_embeddings", {"rope_parameters": rope, "max_position_embeddings": ABSENT}
    bare = {key: value for key, value in rope.items() if key not in (original, "factor")}
    yield f"{kind} of max_position_embeddings", {"rope_parameters": bare | {"factor": None}}


def _nested(kind: str, rope: Case) -> Iterator[tuple[str, Case]]:
    """For each kind of layer."""
    plain = {key: value for key, value in rope.items() if key != "rope_theta"}
    default, local = {"rope_type": "default", "rope_theta": 50.0}, {"rope_local_base_freq": 70.0}
    nested = {"full_attention": rope, "sliding_attention": default}
    yield f"nested {kind}", {"rope_parameters": nested}
    yield f"nested {kind} of local layers", {"rope_parameters": {"full_attention": default, "sliding_attention": rope}}
    yield f"nested {kind} in rope_scaling", {"rope_scaling": nested}
    yield f"nested {kind} alone", {"rope_parameters": {"full_attention": rope}}
    yield f"nested {kind} beside null", {"rope_parameters": {"full_attention": rope, "sliding_attention": None}}
    yield f"nested {kind} without rope_theta", {"rope_parameters": nested | {"full_attention": plain}} | local | THETA
    yield f"nested {kind} under rope_scaling", {"rope_parameters": nested, "rope_scaling": plain | {"factor": 2.0}}
    yield f"nested {kind} beside fields", {"rope_parameters": nested | {"truncate": False, "factor": 3.0}}
    inside = nested | {"full_attention": rope | {"truncate": False}}
    yield f"nested {kind} with truncate", {"rope_parameters": inside}
    bare = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    top = {"original_max_position_embeddings": 8, "partial_rotary_factor": 1.0}
    yield f"nested {kind} and fields at the top", {"rope_parameters": nested | {"full_attention": bare}} | top
    yield f"{kind} and rope_local_base_freq", {"rope_scaling": plain} | local | THETA
    yield f"{kind} and rope_local_base_freq null", {"rope_scaling": plain, "rope_local_base_freq": None} | THETA


def _places() -> Iterator[tuple[str, Case]]:
    """Nothing, and what is no rope."""
    for name in ("rope_scaling", "rope_parameters"):
        for value in (None, {}, [], "linear", 3, True, [["factor", 2.0]]):
            yield f"{name} {json.dumps(value)}", {name: value}
        for kind in ("ntk", "mrope", "axial", "su", None, 3, ["linear"], {"a": 1}):
            fields = KINDS["longrope"] | {"rope_type": kind}
            yield f"rope_type {json.dumps(kind)} in {name}", {name: fields}
        yield f"no rope_type in {name}", {name: {"factor": 4.0}}
        yield f"type null in {name}", {name: {"type": None, "factor": 4.0}}
    yield "nothing", {}
    yield "rope_theta alone", THETA
    yield "yarn as longrope", {"rope_scaling": KINDS["longrope"] | {"rope_type": "yarn"}}
    for value in (0, -1.0, 1.0, "100", True, [100.0]):
        yield f"rope_theta {json.dumps(value)}", {"rope_theta": value}
        yield (
            f"rope_theta {json.dumps(value)} inside",
            {"rope_parameters": {"rope_type": "default", "rope_theta": value}},
        )
    for value in (2.0, 0.0, -0.5, "0.5", 0.4):
        yield f"partial_rotary_factor {json.dumps(value)}", {"partial_rotary_factor": value}


def _short(fields: Case) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in fields.items())


@dataclass(frozen=True)
class Computed:
    """What is computed from a config.json.

    Args:
        waves: of each kind of layer, sorted by name, and each of `LENGTHS`: `sketch` of cosines and sines. scale: what
            scores are multiplied by.
    """

    waves: np.ndarray
    scale: float


def sketch(cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """`DIRECTIONS` projections of `seq frequencies`."""
    both = np.stack([cos, sin]).astype(np.float64)
    return np.random.RandomState(both.size).standard_normal((DIRECTIONS, both.size)) @ both.ravel() / both.size**0.5


def is_of(share: int, family: str, name: str) -> bool:
    """Whether a case is one of those that are tried where one in `share` is."""
    return zlib.crc32(f"{family}/{name}".encode()) % share == 0


def load() -> dict[str, dict[str, Computed | None]]:
    """Family → name of a case → what `transformers` computes; None: it refuses."""
    with np.load(FILE) as stored:
        names, values = json.loads(str(stored["names"])), stored["values"].astype(np.float64)
    rows, found = iter(values), {}
    for family, of_family in names.items():
        found[family] = {name: _computed(next(rows)) for name in of_family}
    return found


def save(computed: Mapping[str, Mapping[str, Computed | None]]) -> None:
    """`load` gives it back."""
    width = 2 * len(LENGTHS) * DIRECTIONS + 1
    values = np.full((sum(map(len, computed.values())), width), np.nan, np.float32)
    for row, one in zip(values, (one for of in computed.values() for one in of.values()), strict=True):
        if one is not None:
            row[: one.waves.size], row[-1] = one.waves, one.scale
    names = json.dumps({family: [*of] for family, of in computed.items()})
    np.savez_compressed(FILE, names=names, values=values)


def _computed(row: np.ndarray) -> Computed | None:
    if np.isnan(row[-1]):
        return None
    return Computed(row[:-1][~np.isnan(row[:-1])], float(row[-1]))
