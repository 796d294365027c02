"""Named axes: patterns, and the two functions through which every array is placed, `einsum` and `shard`.

Arrays are plain `jax.Array`s. Names live in patterns ("batch seq embed, embed mlp -> batch seq mlp") and in the
declarations of parameters; what a name means on the device mesh is said by the placement in force (`axon.layout`).

`name.role` is the same dimension with a row of its own in the layout's table; it falls back to the row of `name`.
"""

from axon.axes.array_spec import ArraySpec
from axon.axes.einsum import Weight, add, einsum, is_weight
from axon.axes.patterns import Names, PatternError, base, parse_einsum, parse_names, strip_roles
from axon.axes.placing import (
    as_cotangent,
    current_explicit,
    per_device,
    reshard,
    scaled,
    shard,
    supports_unreduced,
    zero3_mesh_axes,
)
from axon.axes.scope import Placement, Scope, activate, current, log_choice
from axon.axes.used import axes_used

__all__ = [
    "ArraySpec",
    "Names",
    "PatternError",
    "Placement",
    "Scope",
    "Weight",
    "activate",
    "add",
    "as_cotangent",
    "axes_used",
    "base",
    "current",
    "current_explicit",
    "einsum",
    "is_weight",
    "log_choice",
    "parse_einsum",
    "parse_names",
    "per_device",
    "reshard",
    "scaled",
    "shard",
    "strip_roles",
    "supports_unreduced",
    "zero3_mesh_axes",
]
