"""What a chunk's forward leaves for its backward: what the remat policy keeps, as arrays that wait in slots.

`jax.vjp` gives a chunk's backward as a function that closes over arrays, and is itself a tree of them. Those that the
stage has anyway when the backward comes, as weights and the chunk's input, are not kept again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from axon.parallel.pipeline.equations import Equations, Pieces

Pullback = Callable[[Any], Any]
"""Gradients of a chunk's outputs → of its arguments, as `jax.vjp` gives it."""


@dataclass(frozen=True)
class Residuals:
    """The arrays of one chunk's backward.

    Args:
        tree: of the backward as `jax.vjp` gives it. numbers: for each of its leaves, the number of the same array among
            the leaves of what is at hand; None for one that is kept.
    """

    tree: Any
    numbers: tuple[int | None, ...]

    @staticmethod
    def of(pull: Pullback, at_hand: Any) -> "Residuals":
        """The residuals of a backward, where the leaves of `at_hand` are there too when it runs."""
        leaves, tree = jax.tree.flatten(pull)
        known = [id(leaf) for leaf in jax.tree.leaves(at_hand)]
        return Residuals(tree, tuple(known.index(id(leaf)) if id(leaf) in known else None for leaf in leaves))

    def kept(self, pull: Pullback) -> Sequence[Array]:
        """The arrays that are to wait."""
        leaves = zip(jax.tree.leaves(pull), self.numbers, strict=True)
        return [leaf for leaf, number in leaves if number is None]

    def pullback(self, kept: Sequence[Array], at_hand: Any) -> Pullback:
        """The backward, of what has waited and of what is at hand."""
        waiting, known = iter(kept), jax.tree.leaves(at_hand)
        return jax.tree.unflatten(self.tree, [next(waiting) if n is None else known[n] for n in self.numbers])


@dataclass(frozen=True)
class Kept:
    """A chunk's forward and backward, traced, and what lies between the two.

    Args:
        forward: of the leaves of what is at hand: in its first part those of the `outputs`, and what waits; in its
            second the arrays of the backward, from what has waited. backward: of the leaves of what is at hand, these
            arrays, and the leaves of the outputs' gradients. gradients: what it gives.
    """

    forward: Equations
    backward: Equations
    outputs: Any
    gradients: Any

    @staticmethod
    def of(pullback: Callable[[Any], tuple[Any, Pullback, Any]], at_hand: Any, at_once: int) -> "Kept":
        """Of a chunk that is run with what is at hand, as `stage.pullback` runs it, and gives the gradients of numbers
        `at_once` on in the first part of its backward."""
        out, pull, statistics = pullback(at_hand)
        residuals = Residuals.of(pull, at_hand)
        leaves, tree = jax.tree.flatten(at_hand)

        def forward(*leaves: Array) -> list[Array]:
            out, pull, statistics = pullback(jax.tree.unflatten(tree, leaves))
            return [*jax.tree.leaves((out, statistics)), *residuals.kept(pull)]

        kept = residuals.kept(pull)
        leaves_of_dy, dy_tree = jax.tree.flatten(out)

        def backward(*given: Array) -> list[Array]:
            at_hand, kept, dy = _parted(given, len(leaves), len(given) - len(leaves_of_dy))
            pull = residuals.pullback(kept, jax.tree.unflatten(tree, at_hand))
            return jax.tree.leaves(pull(jax.tree.unflatten(dy_tree, dy)))

        outputs = jax.tree.structure((out, statistics))
        return Kept(
            Equations.of(forward, leaves, until=outputs.num_leaves),
            Equations.of(backward, [*leaves, *kept, *leaves_of_dy], at_once),
            outputs,
            jax.tree.structure(jax.eval_shape(pull, out)),
        )

    def run_forward(self, at_hand: Any) -> tuple[Any, Sequence[Array]]:
        """The outputs, and what is to wait."""
        found, waits = self.forward.run_first(jax.tree.leaves(at_hand))
        made = [_whole(found[number]) for number in range(self.outputs.num_leaves)]
        return jax.tree.unflatten(self.outputs, made), waits

    def run_backward(self, at_hand: Any, waited: Sequence[Array], dy: Any, left: Sequence[Array] | None) -> Any:
        """Of each gradient its pieces, None where the other part gives them; and what is left for the second part,
        which this is if that is given."""
        leaves = jax.tree.leaves(at_hand)
        kept = [_whole(pieces) for _, pieces in sorted(self.forward.run_second(leaves, waited).items())]
        given = [*leaves, *kept, *jax.tree.leaves(dy)]
        if left is None:
            found, left = self.backward.run_first(given)
        else:
            found, left = self.backward.run_second(given, left), []
        return jax.tree.unflatten(self.gradients, [found.get(n) for n in range(self.gradients.num_leaves)]), left


def _whole(pieces: Pieces) -> Array:
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, 0)


def _parted(values: Sequence[Array], *ends: int) -> Iterator[Sequence[Array]]:
    """The values up to the first end, from there to the next, and so on."""
    return (values[start:end] for start, end in zip((0, *ends), (*ends, len(values)), strict=True))
