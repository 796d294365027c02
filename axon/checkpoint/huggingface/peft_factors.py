"""The factors of our adapters in PEFT's files, read and written."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from axon.axes.array_spec import ArraySpec
from axon.axes.patterns import Names, base
from axon.checkpoint.huggingface.form import Dim, Form
from axon.checkpoint.huggingface.hub import ADAPTER
from axon.checkpoint.huggingface.peft import BASE, BIAS, FACTORS, FILE, MAGNITUDE, MATRIX, ROOT, TABLE, WEIGHT
from axon.checkpoint.huggingface.pieces import Piece, Pieces
from axon.checkpoint.huggingface.save import Entry, Theirs, write_file
from axon.disk import writing
from axon.errors import UserError

RANK = Dim(("rank",), None, ())


@dataclass(frozen=True)
class Factors:
    """The factors of adapted weights in PEFT's files.

    `pieces`: where they are in ours, PATH/a and PATH/b. `transposed`: whether the matrices lie as `in out`. `shared`:
    names of arrays that are of several weights of ours. `saved`: names of the model's arrays that are there anew.
    """

    pieces: Pieces
    transposed: bool
    shared: frozenset[str]
    saved: tuple[str, ...] = field(default=())

    def with_saved(self, pieces: Pieces, paths: Collection[str]) -> "Factors":
        """With whole modules of the model with the arrays `pieces`: those of which the parameters `paths` are a part,
        as PEFT's `modules_to_save`. Raises `UserError` for one that has an adapted matrix."""
        modules = {_module_of(one.name) for path in paths for one in pieces.of[path]}
        whole = {path: own for path, own in pieces.of.items() if any(_module_of(one.name) in modules for one in own)}
        adapted = {path.rpartition("/")[0] for path in self.pieces.of}
        if both := sorted(whole.keys() & adapted):
            raise UserError(
                f"{both[0]} has an adapter, and LoRA.others trains another array of its module, and PEFT's format has "
                "either for a module: take one out of LoRA.paths or LoRA.others, or merge the run: axon convert RUN "
                "hf:DIR"
            )
        named = {path: [replace(one, name=ROOT + one.name) for one in own] for path, own in whole.items()}
        names = sorted({one.name for own in whole.values() for one in own})
        shapes = {ROOT + name: pieces.shapes[name] for name in names}
        groups = {ROOT + name: pieces.groups[name] for name in names}
        mine = self.pieces
        joined = Pieces({**mine.of, **named}, {**mine.shapes, **shapes}, {**mine.groups, **groups})
        return replace(self, pieces=joined, saved=tuple(names))


def factors_of(pieces: Pieces, stored: Mapping[str, ArraySpec], adapted: Collection[str]) -> Factors:
    """Factors of the weights `adapted`, in a model with the arrays `pieces`; `stored`: our parameters with them.

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
    _check_magnitudes(of, groups)
    shared = frozenset(name for name, paths in owners.items() if len(paths) > 1)
    return Factors(Pieces(of, shapes, groups), True in transposed, shared)


def _check_magnitudes(of: Mapping[str, list[Piece]], groups: Mapping[str, int]) -> None:
    """Raise `UserError` for magnitudes of a part of an array of theirs: those of the others would have to be said."""
    sizes: dict[str, int] = defaultdict(int)
    for path in (path for path in of if path.endswith("/magnitude")):
        for piece in of[path]:
            sizes[piece.name] += piece.form.group_size
    if parts := [name for name, size in sizes.items() if size != groups[name]]:
        raise UserError(
            f"{_module(parts[0])} is one array of several weights in their files, of which LoRA.paths has some alone, "
            "and DoRA's magnitudes are of all of it: adapt all of them, or merge the run: axon convert RUN hf:DIR"
        )


def joined_factors(
    pieces: Pieces, stored: Mapping[str, ArraySpec], adapted: Collection[str], values: Mapping[str, Any]
) -> tuple[dict[str, ArraySpec], dict[str, Any]]:
    """Our parameters and their values, in which weights that are one array of theirs have one A, those of all of them
    one after the other along `rank`, and each a B that is 0 but for its own rows: their product is that of each."""
    specs, joined = dict(stored), dict(values)
    for paths in _one_array(pieces, adapted):
        of_a = [np.asarray(values[f"{path}/a"], np.float32) for path in paths]
        axes = {factor: tuple(map(base, stored[f"{paths[0]}/{factor}"].axes)).index("rank") for factor in "ab"}
        whole = np.concatenate(of_a, axes["a"])
        starts = np.cumsum([0, *(one.shape[axes["a"]] for one in of_a)]).tolist()
        for path, start, end in zip(paths, starts, starts[1:], strict=False):
            b = np.asarray(values[f"{path}/b"], np.float32)
            room = [(0, 0)] * b.ndim
            room[axes["b"]] = (start, starts[-1] - end)
            joined |= {f"{path}/a": whole, f"{path}/b": np.pad(b, room)}
            for factor in "ab":
                specs[f"{path}/{factor}"] = replace(stored[f"{path}/{factor}"], shape=joined[f"{path}/{factor}"].shape)
    return specs, joined


def _one_array(pieces: Pieces, adapted: Collection[str]) -> list[tuple[str, ...]]:
    """The adapted weights of which each array of theirs has several, in its order."""
    owners: dict[str, dict[str, int]] = defaultdict(dict)
    for path in adapted:
        for piece in pieces.of[path]:
            owners[piece.name][path] = piece.start
    found = {tuple(sorted(own, key=own.__getitem__)) for own in owners.values() if len(own) > 1}
    return sorted(found)


def _end(factor: str, is_table: bool) -> str:
    """How the name of a factor of ours ends there."""
    return (*(TABLE if is_table else MATRIX), MAGNITUDE)[FACTORS.index(factor)]


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
    """PEFT's two files, in float32. `settings`: of the config, whose r, lora_alpha and use_rslora are of modules of
    that rank, and others have the same scale; `base`: the digest of the model that it is of."""
    ranks = {_module(name): shape[0] for name, shape in factors.pieces.shapes.items() if name.endswith(MATRIX[0])}
    others = {module: rank for module, rank in ranks.items() if rank != settings["r"]}
    growth = {module: rank / settings["r"] for module, rank in others.items()}
    power = 0.5 if settings["use_rslora"] else 1
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": factors.transposed,
        "rank_pattern": others,
        "alpha_pattern": {module: settings["lora_alpha"] * more**power for module, more in growth.items()},
        "modules_to_save": sorted({_module_of(name) for name in factors.saved}) or None,
    }
    modules = sorted({_module(name) for name in factors.pieces.shapes if name.removeprefix(ROOT) not in factors.saved})
    text = json.dumps(config | {"target_modules": modules} | dict(settings), indent=2)
    with writing(folder / ADAPTER):
        (folder / ADAPTER).write_text(text + "\n", encoding="utf-8")
    entries = [Entry(name, "F32", shape) for name, shape in factors.pieces.shapes.items()]
    write_file(folder / FILE, entries, theirs, {BASE: base})


def _module(name: str) -> str:
    end = next(end for end in (*MATRIX, *TABLE, MAGNITUDE) if name.endswith(end))
    return name.removeprefix(ROOT).removesuffix(end)


def _module_of(name: str) -> str:
    """The module of an array of the model."""
    return name.removesuffix(WEIGHT).removesuffix(BIAS)
