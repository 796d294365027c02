"""contract(): NumPy's einsum, flattened or not, for any two operands."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from axon.axes.contraction import broadcast_to_axes, contract, permuted

NAMES = "abcdef"


@st.composite
def contractions(draw):
    """Two operands' names and an output's, in any order; a name of one operand only is in the output."""
    left = draw(st.permutations(NAMES).map(lambda n: n[: draw(st.integers(1, 4))]))
    right = draw(st.permutations(NAMES).map(lambda n: n[: draw(st.integers(1, 4))]))
    shared = sorted(set(left) & set(right))
    kept = [n for n in shared if draw(st.booleans())]
    out = draw(st.permutations(sorted(set(left) ^ set(right)) + kept))
    return tuple(left), tuple(right), tuple(out)


@settings(max_examples=25)
@given(contractions(), st.booleans(), st.integers(0, 2**31))
def test_contract_is_numpys_einsum(names, flatten, seed):
    left, right, out = names
    rng = np.random.default_rng(seed)
    sizes = {n: int(rng.integers(1, 4)) for n in NAMES}
    a, b = (rng.normal(size=[sizes[n] for n in side]).astype(np.float32) for side in (left, right))
    expected = np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", a.astype(np.float64), b)
    made = jax.jit(lambda a, b: contract(a, left, b, right, out, flatten=flatten))(a, b)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


def test_aligned_orders_axes_and_makes_room_for_the_ones_that_are_missing(rng):
    value = rng.normal(size=(2, 3))
    made = broadcast_to_axes(value, ("c", "a"), ("a", "b", "c"))
    np.testing.assert_array_equal(made, value.T.astype(np.float32)[:, None, :])


def test_permuted_keeps_the_sums_that_are_owed():
    from jax.sharding import PartitionSpec

    spec = PartitionSpec("data", None, unreduced={"tensor"})
    assert permuted(spec, (1, 0)) == PartitionSpec(None, "data", unreduced={"tensor"})
