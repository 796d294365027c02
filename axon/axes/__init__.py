"""Named axes: patterns, and the two functions through which every array is placed, `einsum` and `shard`.

Arrays are plain `jax.Array`s. Names live in patterns ("batch seq embed, embed mlp -> batch seq mlp") and in the
declarations of parameters; what a name means on the device mesh is said by the placement in force (`axon.layout`).

`name.role` is the same dimension with a row of its own in the layout's table; it falls back to the row of `name`.
"""

from axon.axes.array_spec import ArraySpec
from axon.axes.by_sequence import at_places, by_sequence
from axon.axes.einsum import add, decoding_einsum, einsum, reporting_einsum
from axon.axes.execution import Execution
from axon.axes.gradients import as_cotangent, like_operand, reduce_gradient, refuse_gradient, scaled
from axon.axes.memory import is_on_host
from axon.axes.memory_order import row_major, row_major_in_training
from axon.axes.patterns import Names, PatternError, base, parse_einsum, parse_names, strip_roles
from axon.axes.permute import permute, permute_or_keep
from axon.axes.placing import (
    current_explicit,
    over_positions,
    per_device,
    reshard,
    shard,
    supports_unreduced,
    zero3_mesh_axes,
)
from axon.axes.scope import (
    Placement,
    Scope,
    activate,
    current,
    exact,
    execution,
    in_block,
    log_choice,
    own_ranks,
    platform,
    sequence_adapters,
    valid_rows,
)
from axon.axes.statistics import MAX, SUM, Report, Reporting
from axon.axes.used import axes_used
from axon.axes.weight import (
    CompositeWeight,
    HostWeight,
    LayerWeight,
    Operation,
    Stored,
    StoredWeight,
    Weight,
    differentiated,
    gathered,
    stored_array,
    use_weight,
    with_place,
)
