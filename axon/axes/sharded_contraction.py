"""A contraction of operands with specs: what is gathered before it, and what is reduced and scattered after it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import ring
from axon.axes.contraction import contract
from axon.axes.patterns import Names, strip_roles
from axon.axes.placing import current_explicit, per_device, reshard, supports_unreduced
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


def sharded_contract(
    scope: Scope, a: Operand, b: Operand, out: Names, spec: PartitionSpec, to: PartitionSpec, dtype: Any = None
) -> tuple[Array, Operand]:
    """The contraction of `a` and `b`, which is made under `spec`, moved to `to`; and `a` as it was worked with.

    `b` is in place. What `a` still lacks is gathered, and what `to` splits further is reduced and scattered: in a
    ring, with compute in between, over the mesh axes in `scope.placement.overlap`, otherwise before and after.
    """
    product = partial(_contract, scope, a.names, b.names, out, dtype)
    if not current_explicit():
        a = a.resharded()
        return reshard(product(a.value, b.value), to), a
    ways = scope.placement.overlap
    if found := single_split(jax.typeof(a.value).sharding.spec, a.spec, ways):
        dimension, mesh_axes = found
        scope.rings.update(mesh_axes)
        name = a.names[dimension]
        held = jax.typeof(a.value).sharding.spec
        made = partial_spec(PartitionSpec(*spec.partitions), _summed(a.names, a.spec, out))
        run = per_device(
            lambda x, y: ring.all_gather_matmul(product, x, a.names, y, b.names, out, name, mesh_axes),
            (held, b.spec),
            (made, a.spec),
        )
        result, whole = run(a.value, b.value)
        return reshard(result, to), replace(a, value=whole)
    a = a.resharded()
    owed = _summed(a.names, a.spec, out)
    if (found := single_split(to, spec, ways)) and set(found[1]) <= set(owed) and out[found[0]] in a.names:
        dimension, mesh_axes = found
        scope.rings.update(mesh_axes)
        made = partial_spec(split(spec, dimension, mesh_axes), [m for m in owed if m not in mesh_axes])
        run = per_device(
            lambda x, y: ring.matmul_reduce_scatter(product, x, a.names, y, out[dimension], mesh_axes),
            (a.spec, b.spec),
            made,
        )
        return reshard(run(a.value, b.value), to), a
    told = spec if spec.unreduced or to == spec or not supports_unreduced() else partial_spec(spec, owed)
    return reshard(product(a.value, b.value, told), to), a


def _contract(scope: Scope, a_names: Names, b_names: Names, out: Names, dtype: Any, a, b, spec=None) -> Array:
    return contract(a, a_names, b, b_names, out, spec, dtype, scope.placement.platform == "cpu")


def _placed(scope: Scope, a, a_names: Names, b, b_names: Names, out: Names, spec, dtype: Any = None) -> Array:
    """`contract`, with the result under `spec`."""
    told = spec if current_explicit() else None
    result = _contract(scope, strip_roles(a_names), strip_roles(b_names), strip_roles(out), dtype, a, b, told)
    return result if current_explicit() else reshard(result, spec)


def _summed(names: Names, spec: PartitionSpec, out: Names) -> list[str]:
    """The mesh axes that split those of `names` that a contraction sums over."""
    return [a for n, entry in zip(names, spec.partitions, strict=True) if n not in out for a in entries(entry)]
