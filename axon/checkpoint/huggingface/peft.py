"""LoRA adapters as PEFT saves them, in and out: a config, and two factors of each matrix by its name in the model.

The format is that of PEFT 0.17: `adapter_config.json`, and in `adapter_model.safetensors` for a matrix NAME.weight of
`out in` the arrays base_model.model.NAME.lora_A.weight (`rank in`) and .lora_B.weight (`out rank`); for a table
.lora_embedding_A and _B. The matrix is NAME.weight + scale · B·A. With `use_dora` there is .lora_magnitude_vector
(`out`) besides, and the matrix has these norms over `in`.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import Names, base
from axon.checkpoint.huggingface.form import Dim, Form
from axon.checkpoint.huggingface.hub import ADAPTER, PREFIX
from axon.checkpoint.huggingface.pieces import Piece, Pieces
from axon.checkpoint.huggingface.save import Entry, Theirs, write_file
from axon.checkpoint.huggingface.weights import Weights
from axon.disk import writing
from axon.errors import UserError, suggest
from axon.foreign_json import ANY, FLAG, NULL, NUMBER, SIZE, TEXT, Kind, one_of, read_field, read_json

FILE = "adapter_model.safetensors"
ROOT = "base_model.model."
WEIGHT = ".weight"
MATRIX, TABLE = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
MAGNITUDE = ".lora_magnitude_vector"
REPLACED = ".base_layer.weight"
"""PEFT saves a table that it adapts too, which it takes instead of the model's."""

FACTORS = ("a", "b", "magnitude")
"""Ours, in the order of theirs; the last of DoRA alone."""

BASE = "base_digest"
"""Name in the file's metadata of the digest of the model that an adapter was trained beside."""

PLAIN: Mapping[str, Kind] = {
    "peft_type": one_of("LORA"),
    "bias": one_of("none", None),
    **dict.fromkeys(("lora_bias", "use_qalora"), one_of(False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), one_of({}, None)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices"), one_of(None, [])),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), one_of(None, [])),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), one_of(None)),
}
"""What more PEFT has that changes what an adapter computes, of which only this is read."""

UNCHANGED = one_of(True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of factors (`init_lora_weights`) that leave the base as it is."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder. `name`: as it was given. base: the model that it is of, as it says."""

    name: str
    folder: Path
    base: str
    rank: int
    alpha: float
    rank_stabilized: bool
    dora: bool
    transposed: bool
    weights: Weights

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    @cached_property
    def factors(self) -> dict[str, tuple[str, ...]]:
        """Name of a matrix of the model → those of A, B and, of DoRA, the magnitude.

        Raises `UserError` for an array that is none of these.
        """
        names, found, more = self.weights.shapes, {}, (MAGNITUDE,) * self.dora
        kinds = [(*one, *more) for one in (MATRIX, TABLE)]
        for name in names:
            if name.endswith(REPLACED):
                continue
            stem = next((name.removesuffix(end) for end in (*MATRIX, *TABLE, *more) if name.endswith(end)), name)
            whole = [ends for ends in kinds if all(stem + end in names for end in ends)]
            if stem == name or not name.startswith(ROOT) or not whole:
                raise UserError(
                    f"{self.folder / FILE} has {name}, without its other factor, or no factor of LoRA; expected "
                    f"{', '.join((f'{ROOT}NAME{MATRIX[0]}', MATRIX[1], *more))}, as PEFT saves them"
                )
            found[stem.removeprefix(ROOT) + WEIGHT] = tuple(stem + end for end in whole[0])
        return found

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
        "rank_stabilized": read_field(where, config, "use_rslora", FLAG | NULL, False) or False,
        "dora": read_field(where, config, "use_dora", FLAG | NULL, False) or False,
        "transposed": read_field(where, config, "fan_in_fan_out", FLAG | NULL, False) or False,
    }
    read_field(where, config, "target_modules", ANY, None)
    if not UNCHANGED.accepts(start := config.get("init_lora_weights")):
        raise UserError(
            f"{where}: init_lora_weights is {start!r}, which took a part of the model's weights into the factors, so "
            "that they are of other weights than the model's. Save it as LoRA of the model, by PEFT's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    return Adapter(name, folder, f"{PREFIX}{source}", **values, weights=Weights(folder, FILE))


class AdaptedWeights(Weights):
    """The arrays of a model in whose matrices an adapter is merged, in float32: W + scale · B·A, of DoRA with its
    magnitudes as norms."""

    def __init__(self, folder: Path, adapter: Adapter):
        super().__init__(folder)
        self._adapter = adapter

    def complete(self, prefix: str, wanted: Collection[str]) -> None:
        """As of `Weights`. Raises `UserError` for an adapter of matrices that the model has not, or of other shapes."""
        super().complete(prefix, wanted)
        for name, factors in self._adapter.factors.items():
            if name not in self:
                raise UserError(
                    f"{self._adapter.name} adapts {name}, which is not in {self.folder}.{suggest(name, self.shapes)}"
                )
            (rank, inputs), (outputs, *_), *more = map(self._adapter.weights.shape, factors)
            sides = (inputs, outputs) if self._is_transposed(factors) else (outputs, inputs)
            if self.shape(name) != sides or rank != self._adapter.rank or any(one != (outputs,) for one in more):
                raise UserError(
                    f"{self._adapter.name} adapts {name} as {sides} by rank {rank}; it is {self.shape(name)} in "
                    f"{self.folder}, and the rank {self._adapter.rank}"
                )

    def whole_digest(self) -> str:
        return f"{super().whole_digest()} {self._adapter.weights.whole_digest()}"

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        if name not in self._adapter.factors:
            return super().read(name, where)
        factors = self._adapter.factors[name]
        is_transposed = self._is_transposed(factors)
        rows, columns = reversed(where) if is_transposed else where
        read = slice(None) if self._adapter.dora else columns  # a norm is of whole rows
        found = self._base(name, (read, rows) if is_transposed else (rows, read)).astype(np.float32)
        merged = self._merged(factors, found.T if is_transposed else found, rows, read)
        merged = merged[:, columns] if self._adapter.dora else merged
        return merged.T if is_transposed else merged

    def _base(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        own, weights = f"{ROOT}{name.removesuffix(WEIGHT)}{REPLACED}", self._adapter.weights
        return weights.read(own, where) if own in weights else super().read(name, where)

    def _merged(self, factors: tuple[str, ...], base: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        """Some rows and columns of `out in`, of those of the base."""
        weights, every = self._adapter.weights, slice(None)
        a, b = weights.read(factors[0], (every, columns)), weights.read(factors[1], (rows, every))
        merged = base + self._adapter.scale * (b.astype(np.float32) @ a.astype(np.float32))
        if not self._adapter.dora:
            return merged
        norm = np.linalg.norm(merged, axis=1, keepdims=True)
        magnitude = weights.read(factors[2], (rows,)).astype(np.float32)[:, None]
        return merged * np.divide(magnitude, norm, where=norm > 0, out=np.zeros_like(norm))

    def _is_transposed(self, factors: tuple[str, ...]) -> bool:
        """Whether the matrix lies as `in out`."""
        return self._adapter.transposed or factors[0].endswith(TABLE[0])


@dataclass(frozen=True)
class Factors:
    """The factors of adapted weights in PEFT's files.

    `pieces`: where they are in ours, PATH/a and PATH/b. `transposed`: whether the matrices lie as `in out`. `shared`:
    names of arrays that are of several weights of ours.
    """

    pieces: Pieces
    transposed: bool
    shared: frozenset[str]


def factors_of(pieces: Pieces, stored: Mapping[str, ArraySpec], adapted: Collection[str]) -> Factors:
    """The factors of the weights `adapted`, in a model with the arrays `pieces`; `stored`: our parameters with the
    factors.

    Raises `UserError` for a weight that is no matrix of their files.
    """
    of: dict[str, list[Piece]] = {}
    groups: dict[str, int] = {}
    owners: dict[str, set[str]] = defaultdict(set)
    transposed = set()
    for path in adapted:
        kinds = [factor for factor in FACTORS if f"{path}/{factor}" in stored]
        sides = [tuple(map(base, stored[f"{path}/{factor}"].axes)) for factor in kinds]
        rank = stored[f"{path}/a"].shape[sides[0].index("rank")]
        for piece in pieces.of[path]:
            dims = [_dimension(piece, side[len(piece.at) :], path) for side in sides]
            is_table = "vocab" in sides[0]
            transposed |= set() if is_table else {piece.form.dims[0] is dims[0]}
            for factor, dim, side in zip(kinds, dims, sides, strict=True):
                name = ROOT + piece.name.removesuffix(WEIGHT) + _end(factor, is_table)
                order = {"a": (RANK, dim), "b": (dim, RANK)}.get(factor, (dim,))
                form = Form(order, side[len(piece.at) :], {**piece.form.sizes, "rank": rank})
                is_part = dim.group is not None
                groups[name] = pieces.groups[piece.name] if is_part else 0
                of.setdefault(f"{path}/{factor}", []).append(Piece(name, piece.at, form, piece.start if is_part else 0))
                owners[name] |= set() if is_part else {path}
    if len(transposed) > 1:
        raise UserError("some adapted matrices lie as `in out` in their files and some as `out in`: adapt one kind")
    shapes = {one.name: one.form.shape(groups[one.name]) for found in of.values() for one in found}
    shared = frozenset(name for name, paths in owners.items() if len(paths) > 1)
    return Factors(Pieces(of, shapes, groups), True in transposed, shared)


def _end(factor: str, is_table: bool) -> str:
    """How the name of a factor of ours ends there."""
    return (*(TABLE if is_table else MATRIX), MAGNITUDE)[FACTORS.index(factor)]


RANK = Dim(("rank",), None, ())


def _dimension(piece: Piece, axes: Names, path: str) -> Dim:
    """The dimension of their matrix that is on this side of it."""
    form = piece.form
    found = [dim for dim in form.dims if {*dim.before, *(dim.group or ()), *dim.after} <= {*axes}]
    if len(form.dims) != 2 or len(found) != 1 or not piece.name.endswith(WEIGHT):
        raise UserError(
            f"{path} is {piece.name} in their files, which is no matrix of its own, and PEFT's format has no "
            "adapter of it: leave it out of LoRA.paths, or merge the run: axon convert RUN hf:DIR"
        )
    return found[0]


def write_adapter(folder: Path, factors: Factors, theirs: Theirs, settings: Mapping[str, Any], base: str) -> None:
    """PEFT's two files, in float32. `settings`: of the config; `base`: the digest of the model that it is of.

    Raises `UserError` for weights that their files have in one array, whose factors are not.
    """
    if factors.shared:
        raise UserError(
            f"{min(factors.shared)} is one factor for several weights of ours, which have their own: PEFT's "
            "format cannot say it. Merge the run: axon convert RUN hf:DIR"
        )
    modules = sorted({_module(name) for name in factors.pieces.shapes})
    config = {"peft_type": "LORA", "bias": "none", "inference_mode": True, "fan_in_fan_out": factors.transposed}
    text = json.dumps(config | {"target_modules": modules} | dict(settings), indent=2)
    with writing(folder / ADAPTER):
        (folder / ADAPTER).write_text(text + "\n", encoding="utf-8")
    entries = [Entry(name, "F32", shape) for name, shape in factors.pieces.shapes.items()]
    write_file(folder / FILE, entries, theirs, {BASE: base})


def _module(name: str) -> str:
    end = next(end for end in (*MATRIX, *TABLE, MAGNITUDE) if name.endswith(end))
    return name.removeprefix(ROOT).removesuffix(end)
