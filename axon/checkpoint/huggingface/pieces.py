"""A table's rows against a module: which arrays of theirs make up each of ours."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

from flax import nnx

from axon.axes.patterns import Names, PatternError, base
from axon.checkpoint.huggingface.form import Form, parse_form
from axon.errors import did_you_mean
from axon.nn import LanguageModel, Param, Variable
from axon.nn.hugging_face import AFTER, Architecture, Row

LAYER = "layer"
SHOWN = 20


@dataclass(frozen=True)
class Declared:
    """One of our arrays: its axes (without roles) and sizes, and the logical numbers of the layers that it stacks."""

    axes: Names
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None


@dataclass(frozen=True)
class Piece:
    """An array of theirs as a part of one of ours.

    Args:
        name: theirs. at: place on each of the dimensions of ours that their name has, the first ones. form: of the
            others. start: where it begins in the brackets.
    """

    name: str
    at: tuple[int, ...]
    form: Form
    start: int


@dataclass(frozen=True)
class Pieces:
    """All arrays of a model: by our path, and their shapes by their name; `groups`: sizes of what is in brackets."""

    of: Mapping[str, Sequence[Piece]]
    shapes: Mapping[str, tuple[int, ...]]
    groups: Mapping[str, int]


def pieces_of(architecture: Architecture, module: nnx.Module, vocab: int | None) -> Pieces:
    """What the arrays of `module` are made of; `vocab`: how many ids there are, where its arrays have more; None: it
    has none."""
    arrays = declared(module)
    found: dict[str, list[Piece]] = defaultdict(list)
    groups: dict[str, int] = defaultdict(int)
    for row in architecture.rows:
        row = replace(row, theirs=numbered(row.theirs, module))
        for path in _matching(row.ours, arrays):
            for name, at, form in _expanded(row, path, arrays[path], vocab):
                found[path].append(Piece(name, at, form, groups[name]))
                groups[name] += form.group_size
    shapes: dict[str, tuple[int, ...]] = {}
    for path, pieces in found.items():
        for piece in pieces:
            shape = piece.form.shape(groups[piece.name])
            if shapes.setdefault(piece.name, shape) != shape:
                raise PatternError(f"{architecture.name}: rows of {piece.name} disagree on its shape, at {path}")
    if unnamed := [path for path, (param, _) in _arrays(module).items() if param and path not in found]:
        raise PatternError(f"{architecture.name}: there is no row with these axes for {', '.join(unnamed)}")
    return Pieces(found, shapes, groups)


def numbered(name: str, module: nnx.Module) -> str:
    """A name of theirs, or a pattern, with the number of the layer after the last."""
    return name.replace(AFTER, str(module.num_layers if isinstance(module, LanguageModel) else ""))


def declared(module: nnx.Module) -> dict[str, Declared]:
    """Every parameter and variable of `module` by its path."""
    return {path: array for path, (_, array) in _arrays(module).items()}


def differences(pieces: Pieces, shapes: Mapping[str, tuple[int, ...]], unused: Iterable[str]) -> list[str]:
    """One line for each array that `shapes` lack, that is not the model's, or that is of another shape.

    `unused`: patterns of names that say nothing.
    """
    extra = [n for n in shapes if n not in pieces.shapes and not any(fnmatchcase(n, one) for one in unused)]
    missing = [f"{name}: missing.{did_you_mean(name, extra)}" for name in pieces.shapes if name not in shapes]
    unknown = [f"{name}: not an array of the model.{did_you_mean(name, pieces.shapes)}" for name in extra]
    misshapen = [
        f"{name}: shape {shapes[name]}, the model's is {shape}"
        for name, shape in pieces.shapes.items()
        if name in shapes and shapes[name] != shape
    ]
    return missing + unknown + misshapen


def _arrays(module: nnx.Module) -> dict[str, tuple[bool, Declared]]:
    """Path → whether it is a parameter, and what it is."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, (Param, Variable))):
        axes = tuple(map(base, variable.stack + variable.axes))
        layers = tuple(variable.layers) if variable.stack else None
        array = Declared(axes, tuple(variable.get_value().shape), layers)
        found["/".join(map(str, path))] = isinstance(variable, Param), array
    return found


def _expanded(row: Row, path: str, array: Declared, vocab: int | None) -> Iterable[tuple[str, tuple[int, ...], Form]]:
    """Each array of theirs that a row names: its name, its place on our dimensions, and its form."""
    named = re.findall(r"\{(\w+)\}", row.theirs)
    leading = [LAYER if name == "layers" else name for name in array.axes[: len(named)]]
    if sorted(named) != sorted(leading) or (array.layers is not None) != (LAYER in named):
        raise PatternError(f"{row.theirs!r} names {named}, and {path} has the axes {' '.join(array.axes)!r}")
    own = array.axes[len(named) :]
    sizes = dict(zip(array.axes, array.shape, strict=True)) | ({} if vocab is None else {"vocab": vocab})
    form = Form(parse_form(" ".join(own) if row.axes is None else row.axes), own, sizes)
    if sorted(form.names) != sorted(own):  # as of a projection from another width, which has a row of its own
        return
    numbers = [array.layers or () if name == LAYER else range(sizes[name]) for name in leading]
    for places in product(*map(enumerate, numbers)):
        values = dict(zip(leading, (number for _, number in places), strict=True))
        yield row.theirs.format(**values), tuple(place for place, _ in places), form


def _matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that `pattern` stands for, whose `*` is one part of a path."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", "[^/]*"))
    return [path for path in paths if wanted.fullmatch(path)]
