"""A step done twice and compared bit for bit: finds arithmetic that is silently wrong (Dixit et al., arXiv:2102.11245;
Hochschild et al., "Cores that don't count", HotOS 2021)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from axon.errors import UserError
from axon.train.state import State
from axon.train.step import Program

SHOWN = 10

Differing = Mapping[str, Sequence[int]]
"""Path of an array → the ids of the devices on which the two results of a step differ."""


class SilentCorruption(UserError):
    """A step gave two results."""


def _ignore(*_: Any) -> None:
    """A callback of which nothing is expected."""


@dataclass
class Replay:
    """Does a step twice, and raises `SilentCorruption` unless both results have the same bits on every device.

    The step reuses the memory of its state, so the state is copied before: a replayed step needs room for one state
    more, and more than twice the time of another. All states have the shapes and shardings of the first: copy and
    comparison are compiled once.

    Args:
        execute: the compiled step. finished: called after each replay with the step, the seconds that the copy, the
            second step and the comparison took, and what differs.
    """

    program: Program
    execute: Callable[..., tuple[State, Mapping[str, Any]]]
    finished: Callable[[int, float, Differing], None] = _ignore
    _copy: Callable[[State], State] | None = field(default=None, init=False)
    _compare: Callable[[Any, Any], Array] | None = field(default=None, init=False)

    def __call__(self, step: int, state: State, *inputs: Any) -> tuple[State, Mapping[str, Any]]:
        """The results of step number `step`; `inputs`: of the compiled step, after the state."""
        copy = self._copied(state)
        result = jax.block_until_ready(self.execute(state, *inputs))
        began = perf_counter()
        differing = self._differing(result, self.execute(copy, *inputs))
        self.finished(step, perf_counter() - began, differing)
        if differing:
            raise SilentCorruption(_message(step, differing))
        return result

    def _copied(self, state: State) -> State:
        if self._copy is None:
            self._copy = self._copier(state)
        with self.program.runtime.tracing():
            return jax.block_until_ready(self._copy(state))

    def _copier(self, state: State) -> Callable[[State], State]:
        shardings = jax.tree.map(lambda x: x.sharding, state)
        return self.program.runtime.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=shardings)

    def _differing(self, one: Any, other: Any) -> Differing:
        leaves, _ = jax.tree_util.tree_flatten_with_path(one)
        names = [jax.tree_util.keystr(path[1:], simple=True, separator="/") for path, _ in leaves]
        if self._compare is None:
            self._compare = self._comparison([_spec(leaf) for _, leaf in leaves])
        differ = np.asarray(self._compare(jax.tree.leaves(one), jax.tree.leaves(other)))
        ids = np.array([device.id for device in self.program.placement.devices])
        return {name: ids[row].tolist() for name, row in zip(names, differ, strict=True) if row.any()}

    def _comparison(self, specs: Sequence[PartitionSpec]) -> Callable[[Any, Any], Array]:
        """Of two lists of arrays: whether they differ, array by array and device by device.

        They are compared shard by shard, so that replicas of an array are compared each on its own device.
        """
        mesh = self.program.placement.mesh

        def local(one: Sequence[Array], other: Sequence[Array]) -> Array:
            differ = [jnp.any(_bits(a) != _bits(b)) for a, b in zip(one, other, strict=True)]
            return jnp.stack(differ)[:, None]

        by_device = PartitionSpec(None, tuple(mesh.axis_names))
        compare = jax.shard_map(local, mesh=mesh, in_specs=(specs, specs), out_specs=by_device, check_vma=False)
        return jax.jit(compare, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _spec(leaf: Any) -> PartitionSpec:
    return leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()


def _bits(x: Array) -> Array:
    """An array's bits as integers: a NaN equals itself, and 0 is not −0."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))


def _message(step: int, differing: Differing) -> str:
    lines = [f"  {path}: on devices {', '.join(map(str, ids))}" for path, ids in list(differing.items())[:SHOWN]]
    more = [f"  … and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
    return "\n".join(
        [
            f"step {step}, done twice from the same state and batch, gave other bits in",
            *lines,
            *more,
            "A device or its memory is faulty, or the program is not deterministic (on GPUs set XLA_FLAGS="
            "--xla_gpu_deterministic_ops=true). Nothing was saved after it; checkpoints since the last replay that "
            "found nothing may be wrong too. Without that device the same command continues from the last of them",
        ]
    )
