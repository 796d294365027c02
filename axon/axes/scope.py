"""The scope in force while a function is traced: where arrays live, and in which precision work is done."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.execution import Execution
from axon.axes.patterns import Names


class Placement(Protocol):
    """What the names of a pattern mean on a mesh. `axon.layout.Placement` is the one there is."""

    @property
    def explicit(self) -> bool: ...
    @property
    def platform(self) -> str: ...
    @property
    def chip(self) -> str: ...
    @property
    def splits_tiled_scatters(self) -> bool: ...
    @property
    def has_host_memory(self) -> bool: ...
    def torus_ring_size(self, mesh_axes: Names) -> int: ...
    def mesh_axes(self, name: str, kind: str = "activations") -> Names: ...
    def spec(self, names: Names, kind: str = "activations") -> PartitionSpec: ...
    @property
    def overlap(self) -> Names: ...
    @property
    def ring(self) -> Names: ...
    @property
    def context(self) -> str | None: ...
    def in_block(self, kind: str) -> "Placement": ...
    def stored_positions(self, seq: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Scope:
    """What `einsum` and `shard` obey while a function is traced: where, and in which precision.

    `compute` is the dtype of a contraction's operands, and so of a weight's gather; `reduce` that of a weight's
    gradient, and so of its reduction over devices; `precision` that of contractions as `jax.lax.Precision` has it, None
    for the platform's own; `row_block`: how many positions of `seq` a contraction works on at once, so that a
    position's result has the same bits however many there are; None: all. `valid_rows`: how many of them, the first
    ones, are of use, an array of the program; None: all. `own_ranks`: bool `batch seq rank`, which of the ranks that
    low-rank adapters share are those of each position's own one; None: no position has an adapter.
    `sequence_adapters`: int32 `batch`, the number of the adapter that each sequence trains, -1 for none; None: nobody
    says. `attention`: what attention's products are made in, as `axon.kernels.attention` has it; None: in the dtype of
    their operands. `execution` says how the program is carried out; `choices` collects what was chosen while tracing,
    by topic (see `log_choice`), and `rings` the mesh axes over which `einsum` made a ring of a collective.

    A scope outlives no trace: JAX caches traces by function identity, so functions handed to its transformations
    are closures made inside one.
    """

    placement: Placement
    compute: Any = jnp.float32
    reduce: Any = jnp.float32
    precision: Any = field(default=None, kw_only=True)
    row_block: int | None = field(default=None, kw_only=True)
    valid_rows: Any = field(default=None, kw_only=True)
    own_ranks: Any = field(default=None, kw_only=True)
    sequence_adapters: Any = field(default=None, kw_only=True)
    attention: Any = field(default=None, kw_only=True)
    execution: Execution = Execution()
    choices: dict[str, str] = field(default_factory=dict)
    rings: set[str] = field(default_factory=set)


_scope: ContextVar[Scope | None] = ContextVar("axon.axes.scope", default=None)


def current() -> Scope | None:
    """The scope in force, or None: then patterns are mathematics only, and arrays stay where they are."""
    return _scope.get()


def platform() -> str:
    """Where the program that is being traced will run: the layout's platform, `cpu` without a layout."""
    scope = current()
    return "cpu" if scope is None else scope.placement.platform


UNSCOPED = Execution()
"""How a function is carried out that is traced without a scope."""


def execution() -> Execution:
    """How the program that is being traced is carried out."""
    scope = current()
    return UNSCOPED if scope is None else scope.execution


@contextmanager
def activate(scope: Scope) -> Iterator[Scope]:
    """Put `scope` in force inside the `with` block."""
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


@contextmanager
def _changed(change: Callable[[Scope], Scope]) -> Iterator[None]:
    """Put what `change` makes of the scope in force inside the `with` block, if there is one."""
    scope = current()
    if scope is None:
        yield
        return
    with activate(change(scope)):
        yield


def in_block(kind: str) -> AbstractContextManager[None]:
    """Put in force, inside the `with` block, what the layout says of a block of this kind alone."""
    return _changed(lambda scope: replace(scope, placement=scope.placement.in_block(kind)))


def exact() -> AbstractContextManager[None]:
    """Put in force, inside the `with` block, float32 operands, multiplied as such: TPUs would round to bfloat16."""
    return _changed(lambda scope: replace(scope, compute=jnp.float32, precision=lax.Precision.HIGHEST))


def valid_rows(count: Array) -> AbstractContextManager[None]:
    """Say that inside the `with` block the first `count` positions of `seq` alone are of use: where a scope has
    `row_block`, a contraction computes no others, and gives 0 for those."""
    return _changed(lambda scope: replace(scope, valid_rows=count))


def own_ranks(own: Array) -> AbstractContextManager[None]:
    """Say that inside the `with` block each position has an adapter: `own`, bool `batch seq rank`, says which of the
    ranks that adapters share are its own one's."""
    return _changed(lambda scope: replace(scope, own_ranks=own))


def sequence_adapters(numbers: Array | None) -> AbstractContextManager[None]:
    """Say that inside the `with` block each sequence trains an adapter: int32 `batch`, its number, -1 for none; None:
    nobody says."""
    return _changed(lambda scope: replace(scope, sequence_adapters=numbers))


ALSO = "; also "
"""What stands between the choices of one topic."""


def log_choice(topic: str, text: str) -> None:
    """Leave word of a choice made while tracing (which kernel, which policy); who traces prints it, once.

    A topic keeps each different text, in the order in which they came: two kinds of attention in one model are both
    logged, and layers that repeat once.
    """
    scope = current()
    if scope is not None:
        known = scope.choices[topic].split(ALSO) if topic in scope.choices else []
        scope.choices[topic] = ALSO.join(dict.fromkeys((*known, text)))
