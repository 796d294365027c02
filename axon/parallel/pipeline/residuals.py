"""What a chunk's forward leaves for its backward: what the remat policy keeps, as arrays that wait in slots.

`jax.vjp` gives a chunk's backward as a function that closes over arrays, and is itself a tree of them. Those that the
stage has anyway when the backward comes, as weights and the chunk's input, are not kept again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

Pullback = Callable[[Any], Any]
"""Gradients of a chunk's outputs → of its arguments, as `jax.vjp` gives it."""


@dataclass(frozen=True)
class Residuals:
    """The arrays of one chunk's backward.

    Args:
        tree: of the backward as `jax.vjp` gives it. numbers: for each of its leaves, the number of the same array among
            the leaves of what is at hand; None for one that is kept. types: of those that are kept, in order.
    """

    tree: Any
    numbers: tuple[int | None, ...]
    types: tuple[Any, ...]

    @staticmethod
    def of(pull: Pullback, at_hand: Any) -> "Residuals":
        """Those of a backward, where the leaves of `at_hand` are there too when it runs."""
        leaves, tree = jax.tree.flatten(pull)
        known = [id(leaf) for leaf in jax.tree.leaves(at_hand)]
        numbers = tuple(known.index(id(leaf)) if id(leaf) in known else None for leaf in leaves)
        kept = [leaf for leaf, number in zip(leaves, numbers, strict=True) if number is None]
        return Residuals(tree, numbers, tuple(map(jax.typeof, kept)))

    def kept(self, pull: Pullback) -> Sequence[Array]:
        """The arrays that are to wait."""
        leaves = zip(jax.tree.leaves(pull), self.numbers, strict=True)
        return [leaf for leaf, number in leaves if number is None]

    def pullback(self, kept: Sequence[Array], at_hand: Any) -> Pullback:
        """The backward, of what has waited and of what is at hand."""
        waiting, known = iter(kept), jax.tree.leaves(at_hand)
        return jax.tree.unflatten(self.tree, [next(waiting) if n is None else known[n] for n in self.numbers])
