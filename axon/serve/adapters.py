"""Low-rank adapters that are served together: whose each rank is, loaded and unloaded while requests run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.errors import UserError, suggest
from axon.runtime import Runtime, flattened, nested
from axon.serve.text_model import EncoderDecoder
from axon.serve.weights import adapter_rank, factors_of

NOBODY = -1
"""The owner of a rank that is free."""

ROOM = "--adapter-rank"
"""What says of which rank the adapters may be, all together."""


@dataclass(frozen=True)
class Adapter:
    """One to load: `factors[PATH/a]` and `[PATH/b]` of the weights that it adapts, float32 with the axes of
    `axon.nn.lora.AdaptedWeight`, `b` times the scale."""

    rank: int
    factors: Mapping[str, np.ndarray]


class Adapters:
    """The adapters of an engine. Each version of one has a number of its own, never used again, by which pages of keys
    and values are known; it keeps its ranks until nobody loads another under its name and no request of it runs.

    `owners[rank]`: the number of the adapter that has it.
    """

    def __init__(self, runtime: Runtime):
        """Raises `UserError` for an encoder–decoder with room for adapters."""
        self._runtime, self._paths = runtime, factors_of(runtime)
        rank = adapter_rank(runtime)
        if rank and isinstance(runtime.module, EncoderDecoder):
            raise UserError(
                "adapters are served beside a model that goes on with a prompt, and a "
                f"{type(runtime.module).__name__} is an encoder–decoder: merge the adapter, axon serve hf:ADAPTER"
            )
        self.owners = np.full(rank, NOBODY, np.int32)
        self._numbers: dict[str, int] = {}
        self._users: Counter[int] = Counter()
        self._last = 0
        self._write = runtime.jit(_written)

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that a request may name."""
        return tuple(self._numbers)

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return self._write._cache_size()

    def number(self, name: str | None) -> int:
        """Of the adapter that has this name now; 0 without one. Raises `UserError` for one that is not loaded."""
        if name is None:
            return 0
        if name not in self._numbers:
            raise UserError(f"no adapter {name!r} is loaded.{suggest(name, self.names)}")
        return self._numbers[name]

    def hold(self, number: int) -> None:
        """A request of it runs or waits."""
        self._users[number] += 1

    def release(self, number: int) -> None:
        """A request of it ends."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
            self._free_unused()

    def load(self, parameters: Any, name: str, adapter: Adapter) -> Any:
        """The parameters with an adapter, in the place of one that has its name already: requests of that go on with
        it. Raises as `check`."""
        self.check(name, adapter)
        self._last += 1
        self.owners[self._free(name)[: adapter.rank]] = self._numbers[name] = self._last
        self._free_unused()
        return self._with(parameters, self.owners == self._last, adapter.factors)

    def unload(self, name: str) -> None:
        """No request may name it any more; those that run go on. Raises `UserError` for one that is not loaded."""
        self.number(name)
        del self._numbers[name]
        self._free_unused()

    def kept(self, before: Any, parameters: Any) -> Any:
        """Other parameters with the adapters of those before."""
        flat = flattened(before)
        return nested(flattened(parameters) | {path: flat[path] for path in self._paths})

    def warm_up(self, parameters: Any) -> None:
        """Compile what writes an adapter."""
        if self._paths:
            self._with(parameters, np.zeros(len(self.owners), bool), {})

    def _with(self, parameters: Any, own: np.ndarray, factors: Mapping[str, np.ndarray]) -> Any:
        """The parameters with an adapter's factors in the ranks that are its `own`, and 0 where it adapts nothing."""
        flat = flattened(parameters)
        for path in self._paths:
            spec = self._runtime.parameters[path]
            at = spec.axes.index("rank")
            new = np.zeros(spec.shape, np.float32)
            if path in factors:
                np.moveaxis(new, at, 0)[own] = np.moveaxis(factors[path], at, 0)
            placed = jax.device_put(new, flat[path].sharding)
            with self._runtime.tracing():
                flat[path] = self._write(flat[path], placed, own.reshape(-1, *[1] * (new.ndim - at - 1)))
        return nested(flat)

    def check(self, name: str, adapter: Adapter) -> None:
        """Raise `UserError` for an adapter of other weights or shapes, one that is not finite, and one that has no
        room."""
        for path, value in adapter.factors.items():
            if path not in self._paths:
                weight, known = path.rpartition("/")[0], sorted({one.rpartition("/")[0] for one in self._paths})
                raise UserError(
                    f"the adapter {name!r} adapts {weight}, which none that is served beside others may: these are "
                    f"{', '.join(known) or 'none'}. Experts' matrices, tables and heads are where an adapter of them "
                    "is named as the server starts, --adapter NAME=PATH; else merge it: axon serve hf:ADAPTER"
                )
            spec = self._runtime.parameters[path]
            wanted = tuple(adapter.rank if axis == "rank" else n for axis, n in zip(spec.axes, spec.shape, strict=True))
            if value.shape != wanted:
                raise UserError(f"the adapter {name!r} has {path} of the shape {value.shape}; expected {wanted}")
            if not np.isfinite(value).all():
                raise UserError(f"the adapter {name!r} has numbers in {path} that are not finite: its file is damaged")
        if (free := len(self._free(name))) < adapter.rank:
            raise UserError(
                f"the adapter {name!r} is of rank {adapter.rank}, and {free} of {len(self.owners)} are free: unload "
                f"another, wait for the requests of one that was unloaded, or raise {ROOM}"
            )

    def _free(self, name: str) -> np.ndarray:
        """The ranks that one with this name may have: those of nobody, and of one before that no request runs with."""
        before = self._numbers.get(name, NOBODY)
        return np.flatnonzero(np.isin(self.owners, [NOBODY] if before in self._users else [NOBODY, before]))

    def _free_unused(self) -> None:
        self.owners[~np.isin(self.owners, [*self._numbers.values(), *self._users])] = NOBODY


def _written(old: Array, new: Array, own: Array) -> Array:
    return jnp.where(own, new.astype(old.dtype), old)
