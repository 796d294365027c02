"""Shards of an optimizer's state that are read from files, updated and written at once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from axon.runtime.stored import is_stored
from axon.train.layer_update import LayerUpdate, Leaves


class UpdateShard(NamedTuple):
    """Some parameters, one layer of them (`number`) or whole (None), and their state's leaves."""

    paths: list[str]
    number: int | None
    own: Leaves

    @property
    def index(self) -> np.int32 | None:
        """An argument of compiled functions, which are the same for all layers."""
        return None if self.number is None else np.int32(self.number)

    @property
    def in_files(self) -> bool:
        return any(map(is_stored, self.own.values()))

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of these parameters."""
        return {path: values[path] for path in self.paths}

    def read(self) -> Callable[[], Leaves]:
        """Start to read the state. What is returned waits for it, and gives it."""
        begun = {key: leaf.read(self.number or 0) for key, leaf in self.own.items() if is_stored(leaf)}
        return lambda: self.own | {key: placed() for key, placed in begun.items()}

    def write(self, new: Leaves) -> Leaves:
        """Start to write what of the new state is in files; all of it, as it is in a state."""
        for key, leaf in self.own.items():
            if is_stored(leaf):
                leaf.write(new[key], self.number or 0)
        return {key: leaf if is_stored(leaf) else new[key] for key, leaf in self.own.items()}

    def wait(self) -> None:
        """Return when it is written."""
        for leaf in filter(is_stored, self.own.values()):
            leaf.wait(self.number or 0)


def pieces(layers: LayerUpdate, state: Any) -> Iterator[UpdateShard]:
    """All of a state: layer after layer of parameters that are stacked, and each of the others."""
    for part, own in zip(layers.parts, layers.divided(state)[0], strict=True):
        for number in (None,) if part.layers is None else range(part.layers):
            yield UpdateShard(part.paths, number, own)


def read_ahead(each: Iterator[UpdateShard]) -> Iterator[tuple[UpdateShard, Leaves]]:
    """Each piece with its state, while that of the next is read."""
    begun: deque[tuple[UpdateShard, Callable[[], Leaves]]] = deque()
    for piece in each:
        begun.append((piece, piece.read()))
        if len(begun) > 1:
            first, placed = begun.popleft()
            yield first, placed()
    for last, placed in begun:
        yield last, placed()
