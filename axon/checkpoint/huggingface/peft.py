"""LoRA adapters as PEFT saves them: a config, and two factors of each matrix by its name in the model.

The format is that of PEFT 0.21: `adapter_config.json`, and in `adapter_model.safetensors` for a matrix NAME.weight of
`out in` the arrays base_model.model.NAME.lora_A.weight (`rank in`) and .lora_B.weight (`out rank`); for a table
.lora_embedding_A and _B. The matrix is NAME.weight + scale · B·A. With `use_dora` there is .lora_magnitude_vector
(`out`) besides, and the matrix has these norms over `in`. With `lora_bias` there is .lora_B.bias (`out`), which times
scale is added to NAME.bias. `modules_to_save` and biases that were trained are base_model.model.NAME.weight and .bias,
in the place of the model's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from axon.checkpoint.huggingface.hub import ADAPTER, PREFIX
from axon.checkpoint.huggingface.weights import Weights
from axon.errors import UserError
from axon.foreign_json import ANY, FLAG, NULL, NUMBER, SIZE, TEXT, Kind, object_of, one_of, read_field, read_json

FILE = "adapter_model.safetensors"
ROOT = "base_model.model."
WEIGHT, BIAS = ".weight", ".bias"
MATRIX, TABLE = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
MAGNITUDE, OF_PRODUCT = ".lora_magnitude_vector", ".lora_B.bias"
WRAPPED = ".base_layer."
"""In names of an adapted module's own arrays: PEFT saves a table that it adapts, too."""

FACTORS = ("a", "b", "magnitude")
"""Ours, in the order of theirs; the last of DoRA alone."""

BASE = "base_digest"
"""Name in the file's metadata of the digest of the model that an adapter was trained beside."""

PLAIN: Mapping[str, Kind] = {
    "peft_type": one_of("LORA"),
    "bias": one_of("none", "all", "lora_only", None),
    "use_qalora": one_of(False, None),
    **dict.fromkeys(("target_parameters", "trainable_token_indices"), one_of(None, [])),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), one_of(None, [])),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), one_of(None)),
}
"""What more PEFT has that changes what an adapter computes, of which only this is read."""

UNCHANGED = one_of(True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of factors (`init_lora_weights`) that leave the base as it is."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder. `name`: as it was given. base: the model that it is of, as it says. rank, alpha: of modules
    of which no key of ranks or alphas, a regular expression, fits the end of the name."""

    name: str
    folder: Path
    base: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilized: bool
    dora: bool
    transposed: bool
    weights: Weights

    @property
    def scale(self) -> float:
        """The scale of modules of which no key of ranks or alphas fits."""
        return self._scale(self.rank, self.alpha)

    def rank_of(self, name: str) -> int:
        """The rank of a matrix of the model."""
        return self._by_pattern(self.ranks, name, self.rank)

    def scale_of(self, name: str) -> float:
        """The scale of a matrix of the model."""
        return self._scale(self.rank_of(name), self._by_pattern(self.alphas, name, self.alpha))

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (rank**0.5 if self.rank_stabilized else rank)

    def _by_pattern(self, values: Mapping[str, Any], name: str, default: Any) -> Any:
        module = name.removesuffix(WEIGHT)
        try:
            return next((values[key] for key in values if re.match(rf"(.*\.)?({key})$", module)), default)
        except re.error as error:
            raise UserError(
                f"{self.folder / ADAPTER}: a pattern of {[*values]} is no regular expression: {error}"
            ) from None

    @cached_property
    def factors(self) -> dict[str, tuple[str, ...]]:
        """Name of a matrix of the model → those of A, B and, of DoRA, the magnitude.

        Raises `UserError` for an array that is none of these, nor `saved` or of `biases`.
        """
        names, found, more = self.weights.shapes, {}, (MAGNITUDE,) * self.dora
        kinds = [(*one, *more) for one in (MATRIX, TABLE)]
        for name in sorted(names.keys() - {*self.saved.values(), *self.biases.values()}):
            stem = next((name.removesuffix(end) for end in (*MATRIX, *TABLE, *more) if name.endswith(end)), name)
            whole = [ends for ends in kinds if all(stem + end in names for end in ends)]
            if stem == name or not name.startswith(ROOT) or not whole:
                raise UserError(
                    f"{self.folder / FILE} has {name}, without its other factor, or no factor of LoRA; expected "
                    f"{', '.join((f'{ROOT}NAME{MATRIX[0]}', MATRIX[1], *more))}, as PEFT saves them"
                )
            found[stem.removeprefix(ROOT) + WEIGHT] = tuple(stem + end for end in whole[0])
        return found

    @cached_property
    def saved(self) -> dict[str, str]:
        """Name of an array of the model → that of the one in its place."""
        own = [name for name in self.weights.shapes if name.startswith(ROOT) and ".lora_" not in name]
        return {name.removeprefix(ROOT).replace(WRAPPED, "."): name for name in own}

    @cached_property
    def biases(self) -> dict[str, str]:
        """Name of a bias of the model → that of what is added to it, before its scale."""
        own = [name for name in self.weights.shapes if name.startswith(ROOT) and name.endswith(OF_PRODUCT)]
        return {name.removeprefix(ROOT).removesuffix(OF_PRODUCT) + BIAS: name for name in own}

    @property
    def replaced(self) -> frozenset[str]:
        """Names of the model's arrays that the adapter has anew and does not adapt."""
        return frozenset(self.saved.keys() - self.factors.keys())

    @property
    def base_digest(self) -> str | None:
        """`HubModel.whole_digest` of the model that it was trained beside, if Axon wrote it."""
        return self.weights.metadata(FILE).get(BASE)


def open_adapter(name: str, folder: Path) -> Adapter:
    """The adapter in a folder. Raises `UserError` for what is none, or more than LoRA of matrices."""
    where, config = str(folder / ADAPTER), read_json(folder / ADAPTER)
    for field, kind in PLAIN.items():
        read_field(where, config, field, kind, None)
    source = read_field(where, config, "base_model_name_or_path", TEXT)
    values = {
        "rank": read_field(where, config, "r", SIZE),
        "alpha": float(read_field(where, config, "lora_alpha", NUMBER)),
        "ranks": read_field(where, config, "rank_pattern", object_of(SIZE) | NULL, None) or {},
        "alphas": read_field(where, config, "alpha_pattern", object_of(NUMBER) | NULL, None) or {},
        "rank_stabilized": read_field(where, config, "use_rslora", FLAG | NULL, False) or False,
        "dora": read_field(where, config, "use_dora", FLAG | NULL, False) or False,
        "transposed": read_field(where, config, "fan_in_fan_out", FLAG | NULL, False) or False,
    }
    read_field(where, config, "target_modules", ANY, None)
    read_field(where, config, "modules_to_save", ANY, None)
    read_field(where, config, "lora_bias", FLAG | NULL, None)
    if not UNCHANGED.accepts(start := config.get("init_lora_weights")):
        raise UserError(
            f"{where}: init_lora_weights is {start!r}, which took a part of the model's weights into the factors, so "
            "that they are of other weights than the model's. Save it as LoRA of the model, by PEFT's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    return Adapter(name, folder, f"{PREFIX}{source}", **values, weights=Weights(folder, FILE))


class EvenFactors:
    """The factors of an adapter as if all were of one rank and scale: rows of A and columns of B beyond its rank are 0,
    which stay 0 as they are trained, and B is times what its scale is beside that of all. See `load.Source`."""

    def __init__(self, adapter: Adapter):
        self._adapter, self._weights = adapter, adapter.weights
        self._of = {one: (name, side) for name, factors in adapter.factors.items() for side, one in enumerate(factors)}
        self.rank = max(map(adapter.rank_of, adapter.factors), default=adapter.rank)

    @property
    def alpha(self) -> float:
        """The alpha that has the adapter's scale with the rank of all."""
        return self._adapter.scale * (self.rank**0.5 if self._adapter.rank_stabilized else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._even(self._weights.shape(name), side) for name, (_, side) in self._of.items()}

    def _even(self, shape: tuple[int, ...], side: int) -> tuple[int, ...]:
        return tuple(self.rank if axis == side and len(shape) > 1 else size for axis, size in enumerate(shape))

    def item_size(self, name: str) -> int:
        return self._weights.item_size(name)

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        matrix, side = self._of[name]
        shape = self._weights.shape(name)
        ranges = [one.indices(size)[:2] for one, size in zip(where, self._even(shape, side), strict=True)]
        own = tuple(slice(min(low, size), min(high, size)) for (low, high), size in zip(ranges, shape, strict=True))
        value = self._weights.read(name, own).astype(np.float32)
        value *= self._adapter.scale_of(matrix) / self._adapter.scale if side == 1 else 1
        return np.pad(value, [(0, high - low - size) for (low, high), size in zip(ranges, value.shape, strict=True)])
