"""How an optimizer's moments are kept between steps: in float32, bfloat16, 8 bits with scales of blocks, or FP8."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey

from axon import axes
from axon.axes import base, log_choice
from axon.axes.specs import num_shards
from axon.errors import UserError
from axon.nn import ParamSpec
from axon.precision.dynamic_code import Blocks, decoded, encoded
from axon.precision.stochastic import random_words, rounded_to_bfloat16
from axon.precision.tensor_scale import Scaled, descaled, scaled
from axon.train.optimizers.groups import Parameters

MomentFormat = Literal["float32", "bfloat16", "dynamic8", "fp8"]

KIND = "optimizer"
TILE, RUN = 16, 64
"""Elements of a block: 16 × 16 of a matrix, and of a table's row so many."""

EXPERTS = "experts"

TABLES = ("vocab", "positions", EXPERTS)
"""Axes along which no block reaches: of what is rare and of what is frequent, gradients differ by magnitudes."""


@dataclass(frozen=True)
class Moments:
    """The arrays of an optimizer's state that are moments of gradients, of a parameter's shape, and how they are kept.

    In bfloat16 they are rounded stochastically. "dynamic8" is the dynamic code with a scale for each block of 16 × 16,
    1.02 bytes a number, or of 64 in a table's rows. Parameters without even blocks, such as vectors, keep theirs in
    float32, and the log says which. "fp8" is e4m3 of numbers of either sign, 1 byte, float16 of those that have none, 2
    bytes, and a scale of each layer's tensor, of experts each one's.

    Args:
        format: between two updates; in an update they are float32. signed: name in the state → whether there are
            negative ones.
    """

    format: MomentFormat = "float32"
    signed: Mapping[str, bool] = field(default_factory=dict)

    def stored(self, state: Any, parameters: Parameters, count: Array) -> Any:
        """A state as it is kept after `count` updates."""

        def store(name: str, path: str, leaf: Array) -> Any:
            if self.format == "bfloat16":
                return rounded(leaf, parameters[path], count, salt=1 + list(self.signed).index(name))
            if self.format == "fp8":
                return _in_fp8(parameters[path], leaf, self.signed[name])
            return _in_blocks(path, parameters[path], leaf, self.signed[name])

        if self.format == "dynamic8":
            log_choice("moments", _text(parameters))
        return state if self.format == "float32" else self._mapped(store, state, parameters)

    def loaded(self, state: Any, parameters: Parameters) -> Any:
        """A state as it is in an update."""

        def load(_: str, path: str, leaf: Any) -> Array:
            if isinstance(leaf, Blocks):
                return _of_blocks(parameters[path], leaf)
            return _of_fp8(parameters[path], leaf) if isinstance(leaf, Scaled) else leaf.astype(jnp.float32)

        return state if self.format == "float32" else self._mapped(load, state, parameters)

    def _mapped(self, fn: Callable[[str, str, Any], Any], state: Any, parameters: Parameters) -> Any:
        """A state with `fn(name, path, moment)` in the place of each moment."""

        def leaf(key: Sequence[Any], value: Any) -> Any:
            keys = [_name(entry) for entry in key]
            name = next((name for name in keys if name in self.signed), None)
            path = next((path for path in keys if path in parameters), None)
            return value if name is None or path is None else fn(name, path, value)

        return jax.tree_util.tree_map_with_path(leaf, state, is_leaf=lambda x: isinstance(x, Blocks | Scaled))


def rounded(x: Array, spec: ParamSpec, count: Array, salt: int = 0) -> Array:
    """`x`, of a parameter's shape, in bfloat16: rounded by bits that follow from the number of updates, `salt`, and an
    element's indices in its layer, and so not from the layout."""
    seed = count.astype(jnp.uint32) * 4 + salt
    words = random_words(seed, spec.own, spec.shape[spec.stack :], KIND)
    return rounded_to_bfloat16(axes.reshard(x, _placed(spec)), words)


def block_of(spec: ParamSpec) -> dict[int, int]:
    """The dimensions along which a block reaches → how far; none of a parameter that has no even blocks.

    They are the two largest that `TILE` divides, or, as in a table, the only one, if `RUN` divides it.
    """
    if len(spec.own) < 2:
        return {}
    sizes = {d: n for d, n in enumerate(spec.shape) if d >= spec.stack and base(spec.axes[d]) not in TABLES}
    tiled = sorted((d for d, size in sizes.items() if size % TILE == 0), key=lambda d: sizes[d])
    if len(tiled) > 1:
        return dict.fromkeys(tiled[-2:], TILE)
    return {d: RUN for d in tiled if sizes[d] % RUN == 0}


def _in_blocks(path: str, spec: ParamSpec, x: Array, signed: bool) -> Any:
    """A moment in 8 bits, each device's blocks its own. Raises `UserError` for blocks that no device has whole."""
    block, scope = block_of(spec), axes.current()
    if not block:
        return x
    shards = [num_shards(scope.placement.mesh_axes(name, KIND)) if scope else 1 for name in spec.axes]
    local = [size // n for size, n in zip(spec.shape, shards, strict=True)]
    for d, length in block.items():
        if local[d] % length:
            raise UserError(
                f"moments = 'dynamic8': blocks of {path} have {length} elements along {spec.axes[d]!r}, of which the "
                f"layout leaves {local[d]} on each of {shards[d]} devices. Split it over fewer for the optimizer "
                f"(Layout.optimizer, Layout.zero), or set moments = 'bfloat16'"
            )
    counts = tuple(size // block.get(d, 1) for d, size in enumerate(local))
    placed = _placed(spec)
    encode = axes.per_device(partial(encoded, counts=counts, signed=signed), (placed,), Blocks(placed, placed))
    return encode(axes.reshard(x, placed))


def _of_blocks(spec: ParamSpec, blocks: Blocks) -> Array:
    placed = _placed(spec)
    here = Blocks(*(axes.reshard(part, placed) for part in blocks))
    return axes.per_device(decoded, (Blocks(placed, placed),), placed)(here)


def _in_fp8(spec: ParamSpec, x: Array, signed: bool) -> Scaled:
    """A moment as e4m3 or float16 with its tensors' scales, on which the devices that share one agree."""
    scope, own = axes.current(), [_has_own_scale(spec, d) for d in range(len(spec.shape))]
    split = [scope.placement.mesh_axes(name, KIND) if scope else () for name in spec.axes]
    over = tuple(axis for names, each in zip(split, own, strict=True) if not each for axis in names)
    counts = [n // num_shards(names) if each else 1 for n, names, each in zip(spec.shape, split, own, strict=True)]
    placed = _placed(spec)
    encode = partial(scaled, counts=tuple(counts), over=over, signed=signed)
    return axes.per_device(encode, (placed,), Scaled(placed, _scales_placed(spec)))(axes.reshard(x, placed))


def _of_fp8(spec: ParamSpec, kept: Scaled) -> Array:
    places = Scaled(_placed(spec), _scales_placed(spec))
    here = Scaled(*(axes.reshard(part, place) for part, place in zip(kept, places, strict=True)))
    return axes.per_device(descaled, (places,), places.values)(here)


def _has_own_scale(spec: ParamSpec, dimension: int) -> bool:
    """Whether each along a dimension is a tensor of its own: layers, and experts."""
    return dimension < spec.stack or base(spec.axes[dimension]) == EXPERTS


def _scales_placed(spec: ParamSpec) -> PartitionSpec:
    entries = enumerate(_placed(spec))
    return PartitionSpec(*(entry if _has_own_scale(spec, d) else None for d, entry in entries))


def _placed(spec: ParamSpec) -> PartitionSpec:
    scope = axes.current()
    return scope.placement.spec(spec.axes, KIND) if scope else PartitionSpec()


def _name(entry: Any) -> Any:
    """What an entry of a key path is called."""
    match entry:
        case DictKey(key=name) | GetAttrKey(name=name):
            return name
    return None


def _text(parameters: Parameters) -> str:
    whole = [path for path, spec in parameters.items() if not block_of(spec)]
    return f"in 8 bits{'; in float32 those without even blocks: ' if whole else ''}{', '.join(whole)}"
