"""The configurations of the Hopper kernel, as they are compiled for an H200."""

from collections.abc import Mapping
from typing import Any

from axon.kernels.paged_attention.gpu import paged_attention_gpu
from axon.kernels.paged_attention.ragged import AttentionConfig
from scripts.bench.case import Case
from scripts.bench.cases.paged_attention import GPT_OSS, LLAMA, case

DECODE = {"sequences": 64, "queries": 1, "length": 2048}
PREFILL = {"sequences": 4, "queries": 1024, "length": 1024}
VERIFICATION = {"sequences": 32, "queries": 4, "length": 2048}
LONG = {"sequences": 2, "queries": 1, "length": 32768}
CHUNK = {"sequences": 1, "queries": 256, "length": 32768}

MODES = {
    "decode": DECODE,
    "prefill": PREFILL,
    "verification of 4": VERIFICATION,
    "long decode, split": LONG,
    "chunk, split": CHUNK,
}

EVERYTHING = {
    "config": AttentionConfig(0.1, window=128, soft_cap=50.0),
    "extra": ("sinks", "alibi_slopes"),
}


def gpu_cases() -> list[Case]:
    """Decode and prefill over every cache at both widths, every mode and page size, and all that a score may have."""
    return [
        _case("decode", "bfloat16", 64),
        _case("decode", "bfloat16", 16, GPT_OSS),
        _case("decode", "float16", 128),
        _case("decode", "bfloat16", 128, GPT_OSS, EVERYTHING),
        _case("decode", "int8", 64),
        _case("decode", "float8_e4m3fn", 128),
        _case("decode", "int8", 128, GPT_OSS),
        _case("verification of 4", "bfloat16", 32),
        _case("long decode, split", "bfloat16", 128),
        _case("long decode, split", "float8_e4m3fn", 32, GPT_OSS),
        _case("prefill", "bfloat16", 64),
        _case("prefill", "bfloat16", 16, GPT_OSS),
        _case("prefill", "float16", 32, extra=EVERYTHING),
        _case("prefill", "int8", 128),
        _case("prefill", "float8_e4m3fn", 64, GPT_OSS),
        _case("chunk, split", "bfloat16", 128),
    ]


def _case(
    mode: str, dtype: str, page_size: int, heads: tuple[int, int, int] = LLAMA, extra: Mapping[str, Any] | None = None
) -> Case:
    name = f"hopper, {mode}, {dtype}, head_dim {heads[2]}, pages of {page_size}" + (", all of a score" if extra else "")
    q = "float16" if dtype == "float16" else "bfloat16"
    options = {"heads": heads, "attend": paged_attention_gpu, "q": q, **MODES[mode], **(extra or {})}
    return case(name, dtype, page_size, **options)
