"""A pytree as it is stored: nested dictionaries, named by path, of plain arrays.

Class names, tuples and empty nodes are left out, so a checkpoint can be read without our code, and a state whose
Python classes were renamed still fits. `State.optimizer[1].mu["layers"]["up"]` is `optimizer/1/mu/layers/up`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from axon.errors import UserError
from axon.runtime.stored import is_stored

Flat = dict[str, Any]


def flat(tree: Any) -> Flat:
    """The leaves of `tree` by path, such as `parameters/layers/up`. Raises `UserError` where two paths coincide."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)[0]
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(found) < len(leaves):
        raise UserError("two leaves of the state have the same path once it is written as text; rename one of them")
    return found


def unpadded(specs: Any) -> dict[str, tuple[int, ...]]:
    """By path, the shape without padding of those of a tree of `ArraySpec`s that have any."""
    return {path: spec.unpadded for path, spec in flat(specs).items() if spec.unpadded is not None}


def subtree(leaves: Mapping[str, Any], name: str) -> Flat:
    """The leaves of `leaves` under the top-level `name`, with their full paths."""
    return {path: leaf for path, leaf in leaves.items() if path == name or path.startswith(name + "/")}


def rebuilt(abstract: Any, leaves: Flat) -> Any:
    """A tree like `abstract` from loaded leaves by path, with PRNG keys wrapped again."""
    wanted = flat(abstract)
    values = [_as_key(leaf, leaves[path]) if is_key(leaf) else leaves[path] for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract, is_leaf=is_stored), values)


def storable(path: str, leaf: Any) -> Any:
    """`leaf` as Orbax can store it: PRNG keys as their bits, scalars as arrays.

    Orbax refuses NumPy scalars, and stores Python numbers without a shape or dtype to compare with. Raises `UserError`
    for anything that is not a number or an array.
    """
    if is_key(leaf):
        return jax.random.key_data(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and np.dtype(dtype).kind not in "OUS" and not hasattr(ts, np.dtype(dtype).name):
        raise UserError(f"{path}: cannot save an array of {np.dtype(dtype).name}, a dtype that TensorStore lacks")
    if isinstance(leaf, jax.Array) or is_stored(leaf):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OUSV" and not hasattr(leaf, "dtype"):
        raise UserError(f"{path}: cannot save a {type(leaf).__name__} in a checkpoint; expected an array or a number")
    return array


def restorable(leaf: Any) -> Any:
    """What to pass Orbax for the abstract `leaf`: a NumPy array where it has no sharding."""
    sharding = getattr(leaf, "sharding", None)
    if is_key(leaf):
        bits = key_bits(leaf)
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding) if sharding else _empty(bits)
    return _empty(leaf) if sharding is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys (`jax.random.key`)."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_bits(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the bits of an array of PRNG keys."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def _as_key(abstract: Any, bits: Any) -> jax.Array:
    impls: list[Any] = []  # `key_impl` needs a key, and of an abstract one there is none outside of a trace
    jax.eval_shape(
        lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(abstract.shape, abstract.dtype)
    )
    return jax.random.wrap_key_data(bits, impl=impls[0])


def _empty(leaf: Any) -> np.ndarray:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
