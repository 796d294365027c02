"""Products with a weight whose outputs are scaled: of values in 8 bits, of directions with a magnitude."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes import Names, base, einsum, parse_einsum, strip_roles
from axon.axes.patterns import Contraction

Product = Callable[[Contraction, Array], Array]
"""(contraction, x) → the product of `x` with the weight without its scales."""


def scaled_product(contraction: Contraction, x: Array, scales: axes.Weight, product: Product) -> Array:
    """`x` contracted with a weight whose outputs are those of `product` times `scales`, which have some of its axes.

    Where the contraction sums over outputs of the weight, `x` is scaled before it.
    """
    called = dict(zip(strip_roles(contraction.right), contraction.right, strict=True))
    names = tuple(called[base(name)] for name in scales.axes)
    plain = set(strip_roles(names))
    if plain <= set(strip_roles(contraction.out)):
        return scaled(contraction.out, names, product(contraction, x), scales)
    if plain <= set(strip_roles(contraction.left)):
        return product(contraction, scaled(contraction.left, names, x, scales))
    kept = tuple(name for name in names if base(name) not in strip_roles(contraction.out))
    out = (*kept, *contraction.out)  # each of those that are summed has its own scales
    inner = parse_einsum(f"{' '.join(contraction.left)}, {' '.join(contraction.right)} -> {' '.join(out)}")
    return jnp.sum(scaled(out, names, product(inner, x), scales), axis=tuple(range(len(kept))))


def scaled(names: Names, of_scales: Names, x: Array, scales: axes.Weight) -> Array:
    """`x`, whose axes are `names`, times scales, whose axes are `of_scales` there."""
    return einsum(f"{' '.join(names)}, {' '.join(of_scales)} -> {' '.join(names)}", x, scales)
