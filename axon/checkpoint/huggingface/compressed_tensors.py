"""Weights as the library compressed-tensors stores them, which vLLM's llm-compressor writes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.quantization_method import WHERE, Method, Parts, packed_codes
from axon.errors import UserError
from axon.foreign_json import shown


class PackQuantized(Method):
    """scale · (code − zero), codes of 4 or 8 bits, stored with half their range added, along the inputs of an output in
    integers of 32 bits; a scale for each group of inputs, or one. Zeros, if there are any, lie along the outputs."""

    endings = tuple(f".weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx"))
    name = ".weight"

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(map(int, parts.read(".weight_shape")))

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        packed, scales = parts.read(".weight_packed"), parts.read(".weight_scale").astype(np.float32)
        outputs, inputs = self.shape(parts, config)
        bits = next((b for b in (4, 8) if -(-inputs * b // 32) == packed.shape[1]), 0)
        if not bits or inputs % scales.shape[1]:
            raise CheckpointError(
                f"{parts}: {outputs} × {inputs} numbers with {packed.shape[1]} integers and {scales.shape[1]} scales "
                "an output: Axon reads 4 and 8 bits, in even groups. Use a copy of the model with bfloat16 weights"
            )
        codes = _signed(packed, bits)[:, :inputs]
        group = np.arange(inputs) // (inputs // scales.shape[1])
        group = parts.read(".weight_g_idx") if ".weight_g_idx" in parts else group
        if ".weight_zero_point" in parts:
            codes = codes - _signed(parts.read(".weight_zero_point").T, bits)[:, :outputs].T[:, group]
        return codes * scales[:, group]


class Scaled(Method):
    """scale · (number − zero), int8 or e4m3; a scale for each output, or one, or one for each block."""

    endings = (".weight_scale", ".weight", ".weight_zero_point", ".input_scale", ".input_zero_point")
    name = ".weight"

    def shape(self, parts: Parts, config: Mapping[str, Any]) -> tuple[int, ...]:
        return parts.shape(".weight")

    def values(self, parts: Parts, config: Mapping[str, Any]) -> np.ndarray:
        values = parts.read(".weight").astype(np.float32)
        if ".weight_zero_point" in parts:
            values -= self._spread(parts, ".weight_zero_point", values.shape)
        return values * self._spread(parts, ".weight_scale", values.shape)

    def _spread(self, parts: Parts, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One for each number, of those that `outputs inputs`, or some of them in even blocks, share."""
        found = parts.read(name).astype(np.float32)
        found = found.reshape(-1, 1) if found.ndim < 2 else found
        if any(size % count for size, count in zip(shape, found.shape, strict=True)):
            raise CheckpointError(f"{parts}{name}: {found.shape} of {shape} numbers; Axon reads scales of even blocks")
        for axis, (size, count) in enumerate(zip(shape, found.shape, strict=True)):
            found = np.repeat(found, size // count, axis=axis)
        return found


FORMATS: Mapping[str, Method] = {
    "pack-quantized": PackQuantized(),
    "int-quantized": Scaled(),
    "float-quantized": Scaled(),
    "naive-quantized": Scaled(),
}
"""By `quantization_config.format`."""


def compressed_tensors(config: Mapping[str, Any]) -> Method:
    """How a `quantization_config` says that weights are stored. Raises `UserError` for a format that is not read."""
    form, sparse = config.get("format"), config.get("sparsity_config")
    if not isinstance(form, str) or form not in FORMATS:
        raise UserError(
            f"{WHERE}.format is {shown(form)}; of compressed-tensors Axon reads {', '.join(FORMATS)}. Use a copy of "
            "the model in one of these, or with bfloat16 weights"
        )
    if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
        raise UserError(f"{WHERE}.sparsity_config.format is {shown(sparse['format'])}; Axon reads dense alone")
    return FORMATS[form]


def _signed(packed: np.ndarray, bits: int) -> np.ndarray:
    """Packed numbers of either sign."""
    return packed_codes(packed, bits) - 2 ** (bits - 1)
