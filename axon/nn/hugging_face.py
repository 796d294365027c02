"""A model as the Hugging Face hub has it: tables that say the same in their names and in ours.

A family's file in `models/` has `HUGGING_FACE`, a tuple of `Architecture`s. They are data:
`axon.checkpoint.huggingface` reads and writes by them, in both directions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Required:
    """The default of a field that has none."""


@dataclass(frozen=True)
class Of:
    """A default: the value of another field of theirs."""

    theirs: str


@dataclass(frozen=True)
class Row:
    """An array of theirs, and where it is in one of ours.

    Args:
        theirs: its name. `{layer}` is the logical number of a layer; the name of one of our axes in braces, as
            `{experts}`, is a place on it: each place is an array of its own.
        ours: the path of a parameter or variable; `*` is any kind of block (`layers/*/mlp/up`). A row is used where
            the model has the path, with these axes: one table serves models with and without a bias.
        axes: their array in the names of our axes, as the left side of an einops pattern whose right side are the axes
            that ours is declared with; None where both are the same. `(heads head_dim) embed` is a dimension of heads,
            and within them of head_dim. Where an array of theirs has several of ours, in rows of the same name, the
            brackets are around what follows each other there, in the order of the rows: `[heads head_dim] embed` for
            queries, then `[kv_heads head_dim] embed` for keys, or `(mlp [1]) embed` for gates and ups in turn.
    """

    theirs: str
    ours: str
    axes: str | None = None


@dataclass(frozen=True)
class Field:
    """A field of their config and one of ours that mean the same; `routing.top_k` is one within another dataclass.

    Args:
        default: what it is where a config.json lacks it. also: names that it has in other config.jsons.
    """

    theirs: str
    ours: str
    default: Any = Required
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constant:
    """A field of theirs for which our model has this value alone.

    Args:
        also: other values that mean the same. moot: fields that say nothing where this one has the value.
    """

    theirs: str
    value: Any
    also: tuple[Any, ...] = ()
    moot: tuple[str, ...] = ()


@dataclass(frozen=True)
class Converted:
    """Fields that functions convert.

    Args:
        read: their config → values by our names, as `Field.ours`. Raises `UserError` for what the model has not.
        write: our config → values by their names. theirs: the names that `read` looks at.
    """

    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    write: Callable[[Any], Mapping[str, Any]]
    theirs: tuple[str, ...]


UNUSED = ("lm_head.weight", "*.rotary_emb.inv_freq")
"""What old files have besides: a tied head, and frequencies."""


@dataclass(frozen=True)
class Architecture:
    """One of their model classes, as one of our configs.

    Args:
        name: as `architectures` of a config.json has it. model_type: likewise. model: the class of our config.
        rows: its arrays. fields: of its config.
        fixed: fields of our config that have this value in all models of the architecture.
        unused: arrays that a file may have and that say nothing, `*` for anything. silent: such fields of its config.
        optional_prefix: what names may lack, as those that were saved without the head: `transformer.`.
    """

    name: str
    model_type: str
    model: type
    rows: tuple[Row, ...]
    fields: tuple[Field | Constant | Converted, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = UNUSED
    silent: tuple[str, ...] = ()
    optional_prefix: str = ""


def in_layers(rows: tuple[Row, ...], theirs: str = "model.layers.{layer}", ours: str = "layers/*") -> tuple[Row, ...]:
    """Rows of a block, as rows of a model."""
    return tuple(Row(f"{theirs}.{row.theirs}", f"{ours}/{row.ours}", row.axes) for row in rows)
