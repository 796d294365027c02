"""The table of a layout: for each named axis and each kind of array, the mesh axes that it is split over."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from axon.axes.patterns import base, parse_names
from axon.errors import UserError, suggest

MESH_AXES = ("replica", "pipe", "data", "expert", "context", "ulysses", "tensor")
"""Dimensions of the device mesh, slowest link first."""

KV = "kv"
"""The mesh axis of neighbours along `tensor` with copies of the same `kv_heads`: see `Layout.replicate_kv`."""

KINDS = ("activations", "params", "grads", "optimizer")
"""Kinds of array. Each starts from the table of the one before it, and adds its own rows."""

CONTEXT = ("gather", "ring", "ulysses", "usp")
"""How attention sees a whole sequence whose positions are split: see `Layout.context`."""

ULYSSES = "ulysses"
"""The mesh axis along which `usp` exchanges positions for heads, of those that split a sequence."""

Row = str | tuple[str, ...] | None
Rows = Mapping[str, Row]

DEFAULT_ROWS: dict[str, tuple[str, ...]] = {
    "replicas": ("replica",),
    "batch": ("replica", "data", "expert"),
    "seq": ("context", ULYSSES),
    "kv_seq": (),
    "embed": (),
    "embed_out": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "nope_dim": (),
    "rope_dim": (),
    "value_dim": (),
    "q_latent": (),
    "q_latent.up": (),
    "kv_latent": (),
    "kv_latent.up": (),
    "key_latent": (),
    "pages": (),
    "page_size": (),
    "mlp": ("tensor",),
    "rank": (),
    "vocab": ("tensor", "pipe"),
    "positions": (),
    "types": (),
    "height": (),
    "width": (),
    "channels": (),
    "patch_height": (),
    "patch_width": (),
    "classes": (),
    "top": (),
    "buckets": (),
    "layers": ("pipe",),
    "experts": (),
    "delta_heads": ("tensor",),
    "per_head": (),
    "key_dim": (),
    "conv_taps": (),
}

ZERO_AXES = ("embed", "q_latent.up", "kv_latent.up")
"""What ZeRO splits: one axis of each matrix. (The matrices from latents to heads have no `embed`.)"""

DEFAULT_STORED_ROWS: dict[str, tuple[str, ...]] = {"experts": ("expert",)}
"""The same from stored parameters on, but for names that have a row of their own in `Layout.rows`: a device has some of
the experts, and the router's scores of all of them for its own tokens."""


class Schedule(Protocol):
    """A pipeline's schedule, as the classes of `axon.parallel.pipeline` are: data, which a config names."""

    @property
    def virtual(self) -> int:
        """Chunks of the model on each stage."""
        ...

    def table(self, stages: int, microbatches: int) -> Any:
        """An `axon.parallel.pipeline.Table`. Raises `UserError` for numbers for which there is none."""
        ...


class LayoutError(UserError):
    """An invalid layout. Names the parameter, axis, sizes and mesh axis, and what would fix it."""


@dataclass(frozen=True)
class Layout:
    """A mesh shape, and a table from named axes to mesh axes.

    Args:
        mesh: mesh axis → number of devices along it; one of them may be -1, for all others. Of more devices than it
            has the first are used, which is said.
        rows: named axis → mesh axis, tuple of mesh axes, or None for "not split", over the defaults, for all arrays.
        params: further rows for stored parameters; grads: for accumulated gradients; optimizer: for its state.
            Each kind starts from the one before it: activations (`rows`), params, grads, optimizer.
        zero: the ZeRO stage (Rajbhandari et al., arXiv:1910.02054), as mesh axes that it adds to the rows of its
            kinds, your own rows included, those of roles (`embed.expert`) too: see `zero`. A row of None in a kind
            leaves that kind out; of a role, the kinds after it as well.
        auto: let XLA's partitioner choose shardings where no pattern does (`AxisType.Auto`), for models that were not
            written in patterns; by default every sharding is part of an array's type (`AxisType.Explicit`).
        microbatches: parts of the batch whose gradients are accumulated and reduced once. (With ZeRO-3 gradients of
            the split parameters are reduced in each: no device ever stores whole ones.)
        schedule: of the pipeline, whose stages are the devices along the mesh axis `pipe`; None for `OneFOneB`.
        pad_layers: where layers do not divide into stages, store identity layers after them, which take their share of
            the blocks' time. Checkpoints and initial values are those of the layers without them.
        overlap: mesh axes over which the gather of an activation before a matmul, or its reduction after one, becomes
            a ring of permutes that overlap with parts of the matmul. Not with `auto`.
        replicate_kv: how many neighbours along `tensor` have the same `kv_heads`, where there are fewer of these
            than devices: they become a mesh axis `kv` of their own.
        context: how attention sees a whole sequence where mesh axes split `seq`. "gather": every device gathers all
            keys and values. "ring": they travel from device to device while each meets its queries, and the sequence
            is stored zig-zag (Liu et al., arXiv:2310.01889). "ulysses": an all-to-all exchanges positions for heads,
            as the rows of `seq.attention` and `heads.attention` (Jacobs et al., arXiv:2309.14509). "usp": the latter
            over the mesh axis `ulysses`, a ring over the others (Fang & Zhao, arXiv:2405.07719); of a mesh without
            that `context` is split in two. Or kind of block → one of these: {"local": "gather", "full": "ring"}. None,
            and what is left out: chosen for the model and the length of its sequences, and printed: see
            `axon.parallel.context.choice`.
        order: mesh axes, slowest link first; a mesh axis of your own must be added here.
    """

    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": -1})
    rows: Rows = field(default_factory=dict)
    params: Rows = field(default_factory=dict)
    grads: Rows = field(default_factory=dict)
    optimizer: Rows = field(default_factory=dict)
    zero: int = 0
    auto: bool = False
    microbatches: int = 1
    schedule: Schedule | None = None
    pad_layers: bool = False
    overlap: tuple[str, ...] = ()
    replicate_kv: int = 1
    context: str | Mapping[str, str] | None = None
    order: tuple[str, ...] = MESH_AXES

    def __post_init__(self):
        self._check_named_once()
        for name, size in self.mesh.items():
            if name not in self.order:
                raise LayoutError(f"Layout.mesh: unknown mesh axis {name!r}.{suggest(name, self.order)}")
            if size < 1 and size != -1:
                raise LayoutError(f"Layout.mesh: {name!r} is {size}; must be at least 1, or -1 for all other devices")
        if list(self.mesh.values()).count(-1) > 1:
            raise LayoutError(f"Layout.mesh: only one mesh axis can be -1, and {dict(self.mesh)} has several")
        if self.zero not in range(4):
            raise LayoutError(f"Layout.zero is {self.zero}; must be 0 (none), 1, 2 or 3")
        for axis in self.overlap:
            if axis not in self.order:
                raise LayoutError(f"Layout.overlap: unknown mesh axis {axis!r}.{suggest(axis, self.order)}")
            if axis not in self.mesh:
                raise LayoutError(
                    f"Layout.overlap: {axis!r} is not among the mesh axes of Layout.mesh, {', '.join(self.mesh)}, so "
                    "nothing would overlap over it. Take it out, or add it to Layout.mesh"
                )
        if self.auto and self.overlap:
            raise LayoutError(
                f"Layout.overlap = {self.overlap} is unsupported with Layout.auto = True, where XLA's partitioner "
                "inserts the collectives. Set Layout.auto to False, or Layout.overlap to ()"
            )
        if self.replicate_kv < 1:
            raise LayoutError(f"Layout.replicate_kv is {self.replicate_kv}; must be at least 1")
        self._check_context()
        if self.microbatches < 1:
            raise LayoutError(f"Layout.microbatches is {self.microbatches}; must be at least 1")
        for where, rows in {"rows": self.rows, **self.stored_rows}.items():
            self._check_rows(where, rows)

    @property
    def stored_rows(self) -> dict[str, Rows]:
        """The rows of each kind of array but activations."""
        return {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}

    def _check_named_once(self) -> None:
        for where, names in (("order", self.order), ("overlap", self.overlap)):
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise LayoutError(f"Layout.{where} has {twice[0]!r} more than once: name each once")

    @property
    def contexts(self) -> frozenset[str]:
        """Every method that `context` names."""
        named = self.context
        return frozenset(named.values() if isinstance(named, Mapping) else () if named is None else (named,))

    def _check_context(self) -> None:
        if isinstance(self.context, Mapping) and not self.context:
            raise LayoutError("Layout.context = {} names no kind of block: write None to have it chosen")
        for method in self.contexts:
            if method not in CONTEXT:
                raise LayoutError(f"Layout.context: unknown method {method!r}.{suggest(method, CONTEXT)}")

    def _check_rows(self, where: str, rows: Rows) -> None:
        for name, row in rows.items():
            parse_names(name)
            for axis in _as_tuple(row):
                if _as_tuple(row).count(axis) > 1:
                    raise LayoutError(f"Layout.{where}: {name!r} is mapped to mesh axis {axis!r} more than once")
                if axis not in self.order:
                    hint = suggest(axis, self.order)
                    raise LayoutError(f"Layout.{where}: {name!r} is mapped to unknown mesh axis {axis!r}.{hint}")
            if base(name) != name and base(name) not in {**DEFAULT_ROWS, **self.rows}:
                hint = suggest(base(name), DEFAULT_ROWS)
                raise LayoutError(f"Layout.{where}: {name!r} is a role of unknown axis {base(name)!r}.{hint}")

    def with_axes_of(self, other: "Layout") -> "Layout":
        """With the rows that `other` has for axes of a model's own, which neither the defaults nor this layout know;
        mesh axes that are not in this layout's order are left out of them."""

        def merged(mine: Rows, rows: Rows) -> Rows:
            new = {name: row for name, row in rows.items() if base(name) not in DEFAULT_ROWS and name not in mine}
            return {**{n: tuple(a for a in _as_tuple(row) if a in self.order) for n, row in new.items()}, **mine}

        return replace(self, rows=merged(self.rows, other.rows), params=merged(self.params, other.params))

    def table(self, kind: str, context: str | None = None) -> dict[str, tuple[str, ...]]:
        """Named axis → mesh axes for one kind of array: the defaults, this layout's rows over them, ZeRO's added.

        `context`: the method of the block that asks, where `Layout.context` has several.
        """
        table, unsplit = dict(DEFAULT_ROWS), set[str]()
        stages = zero(self.zero)
        for step in KINDS[: KINDS.index(kind) + 1]:
            own = self.stored_rows.get(step, self.rows)
            if step == "params":
                table |= {name: row for name, row in DEFAULT_STORED_ROWS.items() if name not in self.rows}
            table |= {name: _as_tuple(row) for name, row in own.items()}
            unsplit = {name for name in (*unsplit, *own) if base(name) != name and own.get(name) is None}
            for name, axes in _with_roles(stages.get(step, {}), table).items():
                if own.get(name, ()) is not None and name not in unsplit:
                    table[name] += tuple(a for a in axes if a not in table[name])
        table = _exchanged(context or self.context, table)
        return table if self.replicate_kv == 1 else {name: _with_copies(name, row) for name, row in table.items()}


def zero(stage: int) -> dict[str, dict[str, tuple[str, ...]]]:
    """ZeRO as rows by kind: what is split over `data` besides the batch (Rajbhandari et al., arXiv:1910.02054).

    1: the optimizer's state; 2: also the accumulated gradients; 3: also the parameters, gathered at their point of
    use (FSDP); of each, `ZERO_AXES`. A layout appends these mesh axes to its own row of the kind, so that any row
    composes with every stage. `replica` is not among them, so that a mesh with both is HSDP.
    """
    return {kind: dict.fromkeys(ZERO_AXES, ("data",)) for kind in KINDS[len(KINDS) - stage :]}


def sequence_parallel() -> dict[str, tuple[str, ...]]:
    """Rows that also split the stream between blocks over `tensor` (Korthikanti et al., arXiv:2205.05198).

    A block's all-reduce becomes a reduce-scatter and an all-gather of the same bytes, and the activations of norms and
    residuals, also those saved for the backward pass, shrink to 1 / tensor.
    """
    return {"seq.residual": ("context", ULYSSES, "tensor")}


def tensor_3d(rows: str = "z", inputs: str = "x", outputs: str = "y") -> dict[str, Any]:
    """Fields of a layout whose matmuls are split over three mesh axes (AxoNN: Singh et al., arXiv:2305.13525).

    Of `batch seq embed, embed mlp -> batch seq mlp` the batch is split over `rows` (AxoNN's depth), `embed` over
    `inputs` and `mlp` over `outputs`; the next matmul sums over `outputs`, so that the two alternate. Each weight is
    stored split over all three, and gathered over `rows` at its point of use.
    """
    split = dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), outputs)
    return {
        "rows": {"batch": ("replica", "data", rows), "embed": inputs} | split,
        "params": {"embed": (inputs, rows)},
        "order": ("replica", "pipe", "data", rows, inputs, outputs),
    }


def _with_roles(stage: dict[str, tuple[str, ...]], table: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """A ZeRO stage's rows, and the same for roles of their axes that have rows of their own."""
    return stage | {name: stage[base(name)] for name in table if name not in stage and base(name) in stage}


def _exchanged(context: Any, table: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """`table` with rows by which attention has whole sequences of some heads: what splits `seq` splits heads."""
    if context not in ("ulysses", "usp"):
        return table
    moved = tuple(a for a in table["seq"] if context == "ulysses" or a == ULYSSES)
    left = tuple(a for a in table["seq"] if a not in moved)
    return {"seq.attention": left, "heads.attention": (*table["heads"], *moved)} | table


def _with_copies(name: str, row: tuple[str, ...]) -> tuple[str, ...]:
    """`row` with `tensor` followed by `KV`, but for `kv_heads`, which that mesh axis replicates."""
    if base(name) == "kv_heads":
        return row
    return tuple(part for axis in row for part in ((axis, KV) if axis == "tensor" else (axis,)))


def _as_tuple(row: Row) -> tuple[str, ...]:
    return () if row is None else (row,) if isinstance(row, str) else tuple(row)
