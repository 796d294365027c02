"""A contraction of operands with specs: what is gathered before it, and what is reduced and scattered after it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import ring
from axon.axes.contraction import blocked_map, contract
from axon.axes.patterns import Names
from axon.axes.placing import current_explicit, per_device, pinned, reshard, supports_unreduced
from axon.axes.scope import Scope
from axon.axes.specs import entries, partial_spec, single_split, split


@dataclass(frozen=True)
class Operand:
    """An array, its names without roles, and the spec that it is to have while it is worked with."""

    value: Array
    names: Names
    spec: PartitionSpec

    def resharded(self) -> "Operand":
        return replace(self, value=reshard(self.value, self.spec))

    def sums_over(self, out: Names) -> list[str]:
        """The mesh axes that split those of its axes that a contraction to `out` sums over."""
        named = zip(self.names, self.spec.partitions, strict=True)
        return [axis for name, entry in named if name not in out for axis in entries(entry)]


def sharded_contract(
    scope: Scope, a: Operand, b: Operand, out: Names, spec: PartitionSpec, to: PartitionSpec, dtype: Any = None
) -> tuple[Array, Operand]:
    """The contraction of `a` and `b`, done under `spec` and moved to `to`; and `a` as it was worked with.

    `b` is in place. What `a` still lacks is gathered, and what `to` splits beyond `spec` is reduced and scattered: in
    a ring, with compute in between, over the mesh axes in `scope.placement.overlap`, otherwise before and after.
    """
    if not current_explicit():
        a = a.resharded()
        result = contract_in_place(scope, a.value, a.names, b.value, b.names, out, None, dtype)
        return reshard(result, to), a
    product = partial(_product, scope, a.names, b.names, out, dtype)
    overlap = scope.placement.overlap
    if found := single_split(jax.typeof(a.value).sharding.spec, a.spec, overlap):
        scope.rings.update(found[1])
        result, a = _gathering(product, a, b, out, spec, *found)
        return reshard(result, to), a
    a = a.resharded()
    summed = a.sums_over(out)
    if (found := single_split(to, spec, overlap)) and set(found[1]) <= set(summed) and out[found[0]] in a.names:
        scope.rings.update(found[1])
        return reshard(_scattering(product, a, b, out, spec, *found), to), a
    # Left partial where a move follows: the move then sums, and scatters what it splits, in one collective.
    deferred = not spec.unreduced and to != spec and supports_unreduced()
    result = product(a.value, b.value, partial_spec(spec, summed) if deferred else spec)
    return reshard(result, to), a


def contract_in_place(
    scope: Scope, a: Array, a_names: Names, b: Array, b_names: Names, out: Names, spec: Any, dtype: Any = None
) -> Array:
    """`contract` of arrays in their places, the result under `spec`; names carry no roles."""
    result = _product(scope, a_names, b_names, out, dtype, a, b, spec if current_explicit() else None)
    return result if spec is None or current_explicit() else reshard(result, spec)


def _product(scope: Scope, a_names: Names, b_names: Names, out: Names, dtype: Any, a, b, spec=None) -> Array:
    flatten = scope.placement.platform == "cpu"
    a, b = (pinned(a), pinned(b)) if spec is not None and spec.unreduced else (a, b)

    def product(a: Array) -> Array:
        return contract(a, a_names, b, b_names, out, spec, dtype, flatten, scope.precision)

    rows = scope.row_block
    if rows is None or "seq" not in a_names or "seq" not in out or "seq" in b_names:
        return product(a)
    return blocked_map(product, a, a_names.index("seq"), out.index("seq"), rows, scope.valid_rows)


def _gathering(
    product: Callable[..., Array],
    a: Operand,
    b: Operand,
    out: Names,
    spec: PartitionSpec,
    dimension: int,
    mesh_axes: Names,
) -> tuple[Array, Operand]:
    """The product, with `a` gathered meanwhile in a ring; and the whole of `a`."""
    chunks = jax.typeof(a.value).sharding.spec
    run = per_device(
        lambda x, y: ring.all_gather_matmul(product, x, a.names, y, b.names, out, a.names[dimension], mesh_axes),
        (chunks, b.spec),
        (partial_spec(PartitionSpec(*spec.partitions), a.sums_over(out)), a.spec),
    )
    result, whole = run(a.value, b.value)
    return result, replace(a, value=whole)


def _scattering(
    product: Callable[..., Array],
    a: Operand,
    b: Operand,
    out: Names,
    spec: PartitionSpec,
    dimension: int,
    mesh_axes: Names,
) -> Array:
    """The product, meanwhile summed over the mesh axes and scattered along a dimension of `out`, in a ring."""
    left = [axis for axis in a.sums_over(out) if axis not in mesh_axes]
    run = per_device(
        lambda x, y: ring.matmul_reduce_scatter(product, x, a.names, y, out[dimension], mesh_axes),
        (a.spec, b.spec),
        partial_spec(split(spec, dimension, mesh_axes), left),
    )
    return run(a.value, b.value)
