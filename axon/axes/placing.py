"""Where an array lives: `shard` by name, `reshard` by spec, and work that each device does on its own shards.

On TPUs some moves are written out, since what their compiler makes of a `reshard` costs more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.patterns import Names, PatternError, parse_names
from axon.axes.scope import Placement, current
from axon.axes.specs import extra_axes, num_shards, of_rank, single_split


def shard(x: Array, pattern: str, kind: str = "activations") -> Array:
    """`x`, with each axis where the layout in force puts its name; `x` itself where no layout is in force."""
    names = parse_names(pattern)
    check_rank(x, names, pattern)
    scope = current()
    return reshard(x, scope.placement.spec(names, kind)) if scope else x


def reshard(x: Array, spec: PartitionSpec) -> Array:
    """`x` under `spec`: a `reshard` on Explicit mesh axes, a constraint on Auto ones, nothing on a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or len(mesh.manual_axes) == len(mesh.axis_names):
        return x
    if not current_explicit():
        return lax.with_sharding_constraint(x, spec)
    scope, spec = current(), of_rank(spec, x.ndim)
    if scope and scope.placement.platform == "tpu" and jax.typeof(x).sharding.spec.unreduced:
        x = scatter_sum(x, spec, scope.placement.splits_tiled_scatters)
    x = gather_in_stages(x, spec, scope.placement.torus_ring_size) if scope else x
    return x if jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)


def pinned(x: Array) -> Array:
    """`x` where its type says, also to XLA's partitioner, which takes a loop's carry to lie where the loop uses it.

    It cannot then make a sum unreduced over fewer mesh axes than it has the operand split over, and ends the process.
    """
    return jax.sharding.reshard(x, jax.typeof(x).sharding.spec)


def current_explicit() -> bool:
    """Whether shardings are part of array types here (`AxisType.Explicit`)."""
    scope = current()
    return scope is not None and scope.placement.explicit


def supports_unreduced() -> bool:
    """Whether a type can say that an array is unreduced: on Explicit mesh axes, outside manual regions.

    Elsewhere a sum over devices cannot be deferred, and is made at once: XLA refuses partial sums over
    one mesh axis where another is manual (jax 0.12 with its own compilers).
    """
    return current_explicit() and not jax.sharding.get_abstract_mesh().manual_axes


def check_rank(x: Array, names: Names, pattern: str) -> None:
    if x.ndim != len(names):
        raise PatternError(f"pattern {pattern!r} names {len(names)} axes, but the array has shape {x.shape}")


def per_device(fn: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable[..., Any]:
    """`fn` run by each device on its own shards, all mesh axes manual; just `fn` where there is one device.

    `inputs` and `outputs` are trees of `PartitionSpec`s like the arguments and the results.

    An output whose spec was made by `partial_spec` is summed over devices: later, by whoever needs the sum, where
    `supports_unreduced`; at once elsewhere.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return fn
    if supports_unreduced():
        return jax.shard_map(fn, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)

    def summed(*shards):
        return jax.tree.map(
            lambda spec, v: lax.psum(v, tuple(spec.unreduced)) if spec.unreduced else v, outputs, fn(*shards)
        )

    plain = jax.tree.map(lambda spec: PartitionSpec(*spec.partitions), outputs)
    return jax.shard_map(summed, in_specs=tuple(inputs), out_specs=plain, check_vma=False)


def zero3_mesh_axes(placement: Placement, name: str, tokens: Names) -> Names:
    """The mesh axes that split `name` in stored parameters, if they are among those that split the tokens (ZeRO-3).

    Work on such a parameter either gathers it, or gathers the tokens and leaves it where it is.
    """
    own = placement.mesh_axes(name, "params")
    return own if set(own) <= set(tokens) else ()


def over_positions(fn: Callable[[Array], Array], x: Array) -> Array:
    """`fn` of `x[batch seq …]`, each device with its sequences whole, in the order of their positions.

    The result, `batch seq …` too, is whole on each device, in the order in which the layout stores positions.
    """
    scope = current()
    if scope is None:
        return fn(x)
    whole = reshard(x, PartitionSpec(*scope.placement.spec(("batch",)), *[None] * (x.ndim - 1)))
    order = scope.placement.stored_positions(x.shape[1])
    if np.array_equal(order, np.arange(x.shape[1])):
        return fn(whole)
    return fn(whole[:, np.argsort(order)])[:, order]


def scatter_sum(x: Array, spec: PartitionSpec, tiled: bool) -> Array:
    """`x`, a partial sum on an Explicit mesh, summed over those mesh axes by which `spec` splits it further.

    What else `spec` asks for is left to whoever moves the result on; `x` itself comes back where `spec` only splits
    it over mesh axes over which it is not unreduced.

    The reduce-scatter is written out: a `reshard` becomes an all-reduce and a slice, which the TPU's compiler does
    not take apart and overlap with the product that makes `x` (see `axon.chips`). `tiled`: by a dimension of which each
    device keeps a part; else a matrix is scattered by a dimension of its own, of as many as there are devices: of
    others XLA for v5p makes an all-reduce and a slice where they are large (a head with 128,256 or 32,000 columns; most
    weights over 2,048 of 4,096 devices). Stacks of matrices, as experts are, it would copy for that (libtpu 0.0.50.1).
    """
    current = jax.typeof(x).sharding.spec
    parts = [extra_axes(old, new) for old, new in zip(current.partitions, spec.partitions, strict=True)]
    summed = {axis for axes in parts for axis in axes or ()}
    if None in parts or not summed or not summed <= current.unreduced:
        return x
    scattered = _tiled if tiled or x.ndim != 2 else _untiled

    def local(part):
        for dimension, axes in enumerate(parts):
            if axes:
                part = scattered(part, axes, dimension)
        return part

    result = PartitionSpec(*spec.partitions, unreduced=current.unreduced - summed)
    return jax.shard_map(local, in_specs=current, out_specs=result, check_vma=False)(x)


def _tiled(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    return lax.psum_scatter(x, mesh_axes, scatter_dimension=dimension, tiled=True)


def _untiled(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    before, (size, *after) = x.shape[:dimension], x.shape[dimension:]
    parts = lax.axis_size(mesh_axes)
    return lax.psum_scatter(x.reshape(*before, parts, size // parts, *after), mesh_axes, scatter_dimension=dimension)


def gather_in_stages(x: Array, spec: PartitionSpec, line_of: Callable[[Names], int]) -> Array:
    """`x` under `spec`, if that is to gather one dimension over devices that lie in more than a plane of a torus;
    otherwise `x`.

    `line_of(mesh_axes)`: how many devices along these, which follow each other, gather first; then do those that hold
    the same of every line. 1: all at once. What travels is what one all-gather would send. For a gather over a whole
    three-dimensional torus the TPU's compiler writes an all-reduce of zeros and the shard, which sends twice as much
    and fills the zeros in first; over a part of it that takes all three dimensions an all-gather during which the
    TensorCore waits. Of lines and of planes it makes all-gathers beside other work.
    """
    current, mesh = jax.typeof(x).sharding.spec, jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or current.unreduced or current.reduced or spec.unreduced or spec.reduced:
        return x
    found = single_split(current, spec, mesh.axis_names)
    if not found:
        return x
    dimension, mesh_axes = found
    line, size = line_of(mesh_axes), num_shards(mesh_axes)
    if line == 1:
        return x
    lines = [list(range(first, first + line)) for first in range(0, size, line)]
    between = [list(range(first, size, line)) for first in range(line)]

    def local(part: Array) -> Array:
        for of in (lines, between):
            part = lax.all_gather(part, mesh_axes, axis_index_groups=of, axis=dimension, tiled=True)
        return part

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        return jax.shard_map(local, in_specs=current, out_specs=spec, check_vma=False)(x)

    # As of a `reshard`: every device has the whole cotangent, and takes its shard of it.
    gathered.defvjp(lambda x: (gathered(x), None), lambda _, cotangent: (jax.sharding.reshard(cotangent, current),))
    return gathered(x)
