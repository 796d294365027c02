"""Weights that a model of the hub stores in few bits, by the arithmetic that its config.json names."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.compressed_tensors import compressed_tensors
from axon.checkpoint.huggingface.quantization_method import WHERE, Method, Parts, packed_codes
from axon.checkpoint.huggingface.weights import Weights
from axon.foreign_json import NULL, SIZE, Kind, Required, one_of, read_field
from axon.precision.microscaling import E2M1_CODES

BLOCK = Kind("two sizes", lambda value: type(value) is list and len(value) == 2 and all(map(SIZE.accepts, value)))

FP8_BLOCK = [128, 128]
"""The `weight_block_size` of FP8 where a config.json says none."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight columns is among the eight codes of an integer, the lowest first."""


class BitsAndBytes(Method):
    """NF4 or FP4, row after row: the number of a code · the scale of its block, which may be in 8 bits itself (Dettmers
    et al., arXiv:2305.14314, section 3). Of two codes in a byte the first has the upper half."""

    endings = (
        *(".absmax", "", ".quant_map", ".nested_absmax", ".nested_quant_map"),
        *(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    )
    fields = MappingProxyType({"bnb_4bit_quant_type": (one_of("nf4", "fp4"), "fp4")})

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(self._state(parts, config)["shape"])

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        state, packed, scales = self._state(parts, config), parts.read("").reshape(-1), parts.read(".absmax")
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
        if "nested_blocksize" in state:
            coarse = np.repeat(parts.read(".nested_absmax"), state["nested_blocksize"])[: scales.size]
            scales = parts.read(".nested_quant_map")[scales] * coarse + np.float32(state["nested_offset"])
        values = parts.read(".quant_map")[codes] * np.repeat(scales, state["blocksize"])[: codes.size]
        return values.reshape(state["shape"])

    def _state(self, parts: Parts, config: Mapping[str, Any]) -> Any:
        form = config.get("bnb_4bit_quant_type", "fp4")
        return json.loads(parts.read(f".quant_state.bitsandbytes__{form}").tobytes())


class GPTQ(Method):
    """scale · (code − zero), codes along the inputs of a column in integers of 32 bits (Frantar et al.,
    arXiv:2210.17323). Zeros are stored less 1, but for the second version of the format. `g_idx`, the group of each
    input, may be left out where groups are neighbours."""

    endings, name = (".qweight", ".qzeros", ".scales", ".g_idx"), ".weight"
    fields = MappingProxyType(
        {"bits": (one_of(2, 4, 8), Required), "checkpoint_format": (one_of("gptq", "gptq_v2"), "gptq")}
    )

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        packed, columns = parts.shape(".qweight")
        return columns, packed * 32 // config["bits"]

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        bits = config["bits"]
        codes, zeros = packed_codes(parts.read(".qweight").T, bits).T, packed_codes(parts.read(".qzeros"), bits)
        group = self._groups(parts, config, len(codes))
        if config.get("checkpoint_format", "gptq") != "gptq_v2":
            zeros = zeros + 1
        return ((codes - zeros[group]) * parts.read(".scales").astype(np.float32)[group]).T

    def _groups(self, parts: Parts, config: Mapping[str, Any], inputs: int) -> np.ndarray:
        if ".g_idx" in parts:
            return parts.read(".g_idx")
        if config.get("desc_act"):
            raise CheckpointError(
                f"{parts}: there is no .g_idx, and by quantization_config.desc_act in config.json inputs are in groups "
                "in any order. Copy the model's files again, or quantise it with desc_act = false"
            )
        size = read_field(WHERE, config, "group_size", SIZE | one_of(-1))
        return np.arange(inputs) // (inputs if size == -1 else size)


class AWQ(Method):
    """scale · (code − zero), codes of eight outputs in an integer, in `AWQ_ORDER` (Lin et al., arXiv:2306.00978)."""

    endings, name = (".qweight", ".qzeros", ".scales"), ".weight"
    fields = MappingProxyType({"bits": (one_of(4), 4), "version": (one_of("gemm", "GEMM"), "gemm")})

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        rows, packed = parts.shape(".qweight")
        return packed * 8, rows

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        codes, zeros = (self._columns(parts.read(name)) for name in (".qweight", ".qzeros"))
        each = len(codes) // len(zeros)
        scales = np.repeat(parts.read(".scales").astype(np.float32), each, axis=0)
        return ((codes - np.repeat(zeros, each, axis=0)) * scales).T

    def _columns(self, x: np.ndarray) -> np.ndarray:
        return packed_codes(x, 4).reshape(len(x), -1, 8)[:, :, AWQ_ORDER].reshape(len(x), -1)


class FP8(Method):
    """e4m3 value · the scale of its block (DeepSeek-V3, arXiv:2412.19437, section 3.3); the last blocks are cut. By a
    `weight_block_size` of null one scale is all of a weight's."""

    endings = ("_scale_inv", "")
    fields = MappingProxyType({"weight_block_size": (BLOCK | NULL, FP8_BLOCK), "expert_dtype": (one_of("fp8"), "fp8")})

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        return parts.shape("")

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        values, scales = (parts.read(part).astype(np.float32) for part in ("", "_scale_inv"))
        tall, wide = config.get("weight_block_size", FP8_BLOCK) or values.shape
        scales = np.repeat(np.repeat(scales.reshape(-1, *scales.shape[1:] or (1,)), tall, axis=0), wide, axis=1)
        return values * scales[: values.shape[0], : values.shape[1]]


class MXFP4(Method):
    """gpt-oss' experts, `experts out in`, which its own name has as `experts in out`: e2m1 numbers, two in a byte, the
    first in its lower half, in blocks of 32 inputs with a power of two each (OCP Microscaling Formats 1.0)."""

    endings, by_rows = ("_blocks", "_scales"), True

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        experts, outputs, blocks, pairs = parts.shape("_blocks")
        return experts, blocks * pairs * 2, outputs

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        numbers = np.array(E2M1_CODES.numbers, np.float32)
        pairs = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=-1)  # of each byte
        scales = parts.read("_scales").view(jnp.float8_e8m0fnu).astype(np.float32)
        values = pairs[parts.read("_blocks")] * scales[..., None, None]
        return values.reshape(*values.shape[:2], -1).swapaxes(1, 2)


METHODS: Mapping[str, Method] = {
    "bitsandbytes": BitsAndBytes(),
    "gptq": GPTQ(),
    "awq": AWQ(),
    "fp8": FP8(),
    "mxfp4": MXFP4(),
}
"""By `quantization_config.quant_method`."""


COMPRESSED = "compressed-tensors"
READ = (*METHODS, COMPRESSED)
"""Values of `quantization_config.quant_method` that are read."""


def is_read(config: Mapping[str, Any]) -> bool:
    """Whether weights with this `quantization_config` are read; bitsandbytes' in 4 bits alone."""
    return config.get("quant_method") in [*READ] and not config.get("load_in_8bit")  # which may be anything


def method_of(config: Mapping[str, Any]) -> Method:
    """How weights are stored, by a `quantization_config` for which `is_read` holds.

    Raises `UserError` for a format of compressed-tensors that is not read, and for a field of another's that is not.
    """
    name = config["quant_method"]
    if name == COMPRESSED:
        return compressed_tensors(config)
    for field_name, (kind, default) in METHODS[name].fields.items():
        read_field(WHERE, config, field_name, kind, default)
    return METHODS[name]


class QuantizedWeights(Weights):
    """The arrays in a folder, those in few bits as the float32 that they stand for, decoded whole where a part is read.

    Args, besides those of `Weights`:
        config: the `quantization_config` of a config.json, for which `is_read` holds.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        super().__init__(folder)
        self._method, self._config, self._lock = method_of(config), config, Lock()
        self._last: tuple[Any, np.ndarray] | None = None
        self._stored = Weights(folder)
        key, *_ = endings = self._method.endings
        stems = {name.removesuffix(key) for name in self._where if name.endswith(key)}
        parts = {f"{stem}{ending}" for stem in stems for ending in endings}
        self._where = {name: at for name, at in self._where.items() if name not in parts}
        self._where |= {f"{stem}{self._method.name}": (key, stem) for stem in stems}

    def complete(self, prefix: str, wanted: Collection[str]) -> None:
        """Biases of 0, as some libraries store them beside every weight, are left out where they are not `wanted`."""
        super().complete(prefix, wanted)
        stems = {stem for key, stem in self._where.values() if key == self._method.endings[0]}
        biases = {name for name, (_, stored) in self._where.items() if stored.removesuffix(".bias") in stems - {stored}}
        for name in biases.difference(wanted):
            if not np.any(self.read(name, (slice(None),))):
                del self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        if (parts := self._parts(name)) is None:
            return super().shape(name)
        return self._method.shape(parts, self._config)

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: "F32" if self._parts(name) else self._slice(name).get_dtype() for name in self._where}

    def item_size(self, name: str) -> int:
        return super().item_size(name) if self._parts(name) is None else np.dtype(np.float32).itemsize

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        if (parts := self._parts(name)) is None:
            return super().read(name, where)
        rows, *others = where if self._method.by_rows else (slice(None), *where)
        with self._lock:  # what several threads read of one weight is decoded once
            if self._last is None or self._last[0] != (name, rows):
                parts = replace(parts, rows=rows)
                self._last = (name, rows), self._method.values(parts, self._config).astype(np.float32)
            values = self._last[1]
        return values[(slice(None), *others) if self._method.by_rows else where]

    def _parts(self, name: str) -> "_StoredParts | None":
        """The parts of a weight in few bits; None of another array."""
        key, stem = self._where[name]
        return _StoredParts(self._stored, stem) if key == self._method.endings[0] else None


@dataclass(frozen=True)
class _StoredParts:
    """`rows`: of the first dimension of each, those that are read."""

    weights: Weights
    stem: str
    rows: slice = field(default_factory=lambda: slice(None))  # has no hash before Python 3.12

    def __contains__(self, part: object) -> bool:
        return f"{self.stem}{part}" in self.weights

    def __str__(self) -> str:
        return f"{self.weights.folder}: {self.stem}"

    def shape(self, part: str) -> tuple[int, ...]:
        return self.weights.shape(f"{self.stem}{part}")

    def read(self, part: str) -> np.ndarray:
        others = (slice(None) for _ in self.shape(part)[1:])
        return self.weights.read(f"{self.stem}{part}", (self.rows, *others))
