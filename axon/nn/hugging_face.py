"""A model as the Hugging Face hub has it: tables that say the same in their names and in ours.

A family's file in `models/` has `HUGGING_FACE`, a tuple of `Architecture`s. They are data:
`axon.checkpoint.huggingface` reads and writes by them, in both directions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from axon.foreign_json import ANY, NULL, Kind, Required, integer, number

LAYERS, EXPERTS = integer("[1, 10000]"), integer("[1, 65536]")
RATE = number("[0, 1)")
"""A fraction of activations that is dropped."""
EPS = number("[0, inf)")
TOKEN_ID = integer("[-1, 2**31)") | NULL
"""-1 in published files: none."""


@dataclass(frozen=True)
class SameAs:
    """A value: that of another field of theirs."""

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
        kind: what it can be. default: what it is where a config.json lacks it, null: where it is null; either may be
            `SameAs` another field. also: names that it has in other config.jsons.
        unset: what ours means where it is None, of our config.
    """

    theirs: str
    ours: str
    kind: Kind
    default: Any = Required
    null: Any = None
    also: tuple[str, ...] = ()
    unset: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Constant:
    """A field of theirs for which our model has this value alone.

    Args:
        also: other values that mean the same.
    """

    theirs: str
    value: Any
    also: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ignored:
    """A field of theirs that says nothing of the function that a model computes; where it is read elsewhere, as that of
    a token's id, `kind` is what it can be."""

    theirs: str
    kind: Kind = ANY


@dataclass(frozen=True)
class Converted:
    """Fields that functions convert.

    Args:
        read: their config, with the defaults of the table's `Field`s → values by our names, as `Field.ours`. Raises
            `UserError` for what the model has not.
        write: our config → values by their names. kinds: the names that `read` looks at → what each can be.
        unset: our names → what ours mean where they are None, of our config.
    """

    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    write: Callable[[Any], Mapping[str, Any]]
    kinds: Mapping[str, Kind]
    unset: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """An array of theirs that is the same as another: a file may have it besides, or instead.

    Args:
        theirs, of: their names. untied: fields of our config where it is an array of its own; empty: none of our models
            has it. absent: fields of our config where a file lacks it.
    """

    theirs: str
    of: str
    untied: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)


HEAD = Copy("lm_head.weight", "model.embed_tokens.weight", {"tied": False})
AFTER = "{after}"
"""In a name of theirs: the number of the layer after the last, which no array of ours has."""
UNUSED = ("*.rotary_emb.inv_freq",)
"""What old files have besides: frequencies."""


@dataclass(frozen=True)
class Architecture:
    """One of their model classes, as one of our configs.

    Args:
        name: as `architectures` of a config.json has it. model_type: likewise. model: the class of our config.
        rows: its arrays. fields: all of its config that `transformers` 5.23 reads, but for those of every family.
        fixed: fields of our config that have this value in all models of the architecture.
        copies: those that are the same as others. unused: arrays that a file may have and that say nothing, `*` for
            anything.
        optional_prefix: what names may lack, as those that were saved without the head: `transformer.`.
        within: a field of our config → the class that it has in this architecture, where its annotation has none.
        present: a field of our config that is true where a file has the array of this name; no config.json says it.
        multi_token: the array that a file with a multi-token block has; our config then has the field `multi_token`,
            true only where the block is asked for.
    """

    name: str
    model_type: str
    model: type
    rows: tuple[Row, ...]
    fields: tuple[Field | Constant | Ignored | Converted, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    copies: tuple[Copy, ...] = (HEAD,)
    unused: tuple[str, ...] = UNUSED
    optional_prefix: str = ""
    within: Mapping[str, type] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    multi_token: str | None = None


LANGUAGE_MODEL = "ForCausalLM"
"""The end of the names of language models, of which other heads have other ends."""


@dataclass(frozen=True)
class HeadTable:
    """Their classes that are a family's language model with a head of another kind, as a config of ours whose field
    `model` is the family's. A module has `HUGGING_FACE_HEADS`, a tuple of such.

    Args:
        suffix: the end of their names, in the place of `LANGUAGE_MODEL`. model: the class of our config.
        rows: arrays of the head. fields: of a config.json that are of the head, by names of our config.
        fits: whether it is for a config.json, of several with one suffix.
        names: a family's architecture → the name with this head, where that is no rule.
    """

    suffix: str
    model: type
    rows: tuple[Row, ...]
    fields: Converted
    fits: Callable[[Mapping[str, Any]], bool]
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, family: Architecture) -> str | None:
        """The name of a family with this head; None of what is no language model."""
        is_one = family.name.endswith(LANGUAGE_MODEL)
        return self.names.get(family.name, family.name.removesuffix(LANGUAGE_MODEL) + self.suffix if is_one else None)

    def around(self, family: Architecture) -> Architecture | None:
        """The table of a family with this head; None of what is no language model."""
        if (name := self.name(family)) is None:
            return None
        fields = *inside(family.fields), self.fields
        fixed = {f"{INSIDE}.{of}": value for of, value in family.fixed.items()}
        head = {"copies": (), "within": {INSIDE: family.model}}
        return replace(
            family, name=name, model=self.model, rows=family.rows + self.rows, fields=fields, fixed=fixed, **head
        )


INSIDE = "model"
"""The field of a config with a head that is the family's config."""


def inside(fields: tuple[Field | Constant | Ignored | Converted, ...]) -> tuple[Any, ...]:
    """A family's fields, as those of a config around the family's."""
    return tuple(map(_inside, fields))


def _inside(one: Field | Constant | Ignored | Converted) -> Field | Constant | Ignored | Converted:
    """A family's field, as one of a config around the family's."""

    def of_family(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda config: function(getattr(config, INSIDE))

    if isinstance(one, Field):
        return replace(one, ours=f"{INSIDE}.{one.ours}", unset=one.unset and of_family(one.unset))
    if isinstance(one, Converted):
        read, unset = one.read, {f"{INSIDE}.{name}": of_family(function) for name, function in one.unset.items()}
        return Converted(
            lambda config: {f"{INSIDE}.{name}": value for name, value in read(config).items()},
            of_family(one.write),
            one.kinds,
            unset,
        )
    return one


def ignored(*names: str) -> tuple[Ignored, ...]:
    """Fields that nothing reads."""
    return tuple(map(Ignored, names))


def in_layers(rows: tuple[Row, ...], theirs: str = "model.layers.{layer}", ours: str = "layers/*") -> tuple[Row, ...]:
    """Rows of a block, as rows of a model."""
    return tuple(Row(f"{theirs}.{row.theirs}", f"{ours}/{row.ours}", row.axes) for row in rows)
