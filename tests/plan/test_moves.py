"""What a change of sharding sends, against formulas written out by hand."""

import math

import pytest
from jax.sharding import PartitionSpec

from axon.plan.moves import ArraySharding, Move, moves, sent


@pytest.fixture
def drawn(rng):
    """Sizes of mesh axes `a`, `b`, `c`, and an array's bytes that all of them divide."""
    mesh = {axis: int(rng.integers(2, 9)) for axis in "abc"}
    return mesh, math.prod(mesh.values()) ** 2 * int(rng.integers(1, 100))


def moved(drawn, before, after):
    mesh, size = drawn
    return moves(size, ArraySharding.of(before, 2), ArraySharding.of(after, 2), mesh)


def test_a_gather_sends_all_but_the_own_shard_of_what_it_makes(drawn):
    mesh, size = drawn
    (move,) = moved(drawn, PartitionSpec("a", "b"), PartitionSpec(None, "b"))
    assert move == Move("all-gather", ("a",), pytest.approx((1 - 1 / mesh["a"]) * size / mesh["b"]))


def test_a_sum_that_is_owed_is_an_all_reduce_of_twice_a_reduce_scatter(drawn):
    mesh, size = drawn
    owed = PartitionSpec(None, "b", unreduced={"a"})
    (whole,) = moved(drawn, owed, PartitionSpec(None, "b"))
    (shard,) = moved(drawn, owed, PartitionSpec("a", "b"))
    assert (whole.kind, shard.kind) == ("all-reduce", "reduce-scatter")
    assert whole.bytes == pytest.approx(2 * shard.bytes)
    assert shard.bytes == pytest.approx((1 - 1 / mesh["a"]) * size / mesh["b"])


def test_a_sum_over_two_mesh_axes_is_scattered_over_one_before_it_is_made_over_the_other(drawn):
    mesh, size = drawn
    scatter, reduce = moved(drawn, PartitionSpec(unreduced={"a", "b"}), PartitionSpec("b"))
    assert (scatter.kind, scatter.mesh_axes) == ("reduce-scatter", ("b",))
    assert reduce == Move("all-reduce", ("a",), pytest.approx(2 * (1 - 1 / mesh["a"]) * size / mesh["b"]))


def test_a_mesh_axis_that_changes_dimension_is_an_exchange_of_local_shards(drawn):
    mesh, size = drawn
    (move,) = moved(drawn, PartitionSpec("a", "c"), PartitionSpec(None, ("c", "a")))
    assert move == Move("all-to-all", ("a",), pytest.approx((1 - 1 / mesh["a"]) * size / mesh["a"] / mesh["c"]))


def test_mesh_axes_that_change_places_within_a_dimension_are_a_permute(drawn):
    mesh, size = drawn
    (move,) = moved(drawn, PartitionSpec(("a", "b")), PartitionSpec(("b", "a")))
    assert move == Move("collective-permute", ("a", "b"), size / mesh["a"] / mesh["b"])


def test_cutting_and_staying_send_nothing(drawn):
    assert moved(drawn, PartitionSpec("a"), PartitionSpec("a")) == []
    assert moved(drawn, PartitionSpec("a"), PartitionSpec(("a", "b"), "c")) == []
    assert moved(drawn, PartitionSpec("a"), PartitionSpec("a", None, reduced={"b"})) == []


def test_one_device_sends_nothing():
    assert sent("all-reduce", 100, 1) == sent("all-gather", 100, 1) == 0
