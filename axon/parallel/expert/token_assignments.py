"""What came back to a device of the copies of its tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class TokenAssignments(NamedTuple):
    """Values of copies, token by token, each somewhere among the `rows` that came back."""

    rows: Array  # rows …
    place: Array  # copies: which row is the copy's
    is_there: Array  # copies: whether there is one; else its value is 0

    def each(self) -> Array:
        """`copies …`."""
        return _taken(*self)

    def summed(self, k: int) -> Array:
        """`tokens …`, each the sum over its k copies, rounded once.

        The k are gathered apart: as one array `tokens k …` they would be padded to a register's 8 or 16 rows on TPUs.
        """
        places, there = self.place.reshape(-1, k), self.is_there.reshape(-1, k)
        parts = [_taken(self.rows, places[:, i], there[:, i]).astype(jnp.float32) for i in range(k)]
        return sum(parts[1:], parts[0]).astype(self.rows.dtype)


def _taken(rows: Array, place: Array, is_there: Array) -> Array:
    found = rows.at[place].get(mode="promise_in_bounds")
    return jnp.where(is_there.reshape(-1, *(1,) * (rows.ndim - 1)), found, 0)
