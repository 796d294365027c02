"""From what each stage does in turn to ticks."""

import pytest

from axon.parallel.pipeline import Chunks, Work
from axon.parallel.pipeline.order import Writer, from_orders
from axon.parallel.pipeline.table import Action

F, B = Action.FORWARD, Action.BACKWARD


def test_a_writer_counts_the_microbatches_of_every_kind_of_work():
    writer = Writer()
    writer.add("F0", 2)
    writer.add("F1 I1 B0", 2)
    assert " ".join(map(str, writer.work)) == "F0 F1 F0/1 I0/1 B0 F1/1 I1/1 B1"
    assert [writer.count(kind) for kind in ("F0", "F1", "I1", "B0", "W1")] == [2, 2, 2, 2, 0]


def test_a_writer_does_the_weights_that_wait_longest():
    writer = Writer()
    writer.add("I1 I0 W I0 W W")
    assert " ".join(map(str, writer.work)) == "I0/1 I0 W0/1 I1 W0 W1"


def test_backwards_are_early_and_forwards_late():
    """Stage 0 could do F1 in tick 1, and then the input would wait on stage 1 until tick 4."""
    orders = [[Work(F, 0), Work(F, 1), Work(B, 0), Work(B, 1)], [Work(F, 0), Work(B, 0), Work(F, 1), Work(B, 1)]]
    table = from_orders(orders, 2, Chunks(2))
    ticks = {(str(cell.work), cell.stage): cell.tick for cell in table.cells()}
    assert ticks == {
        ("F0", 0): 0, ("F0", 1): 1, ("B0", 1): 2, ("F1", 0): 2, ("B0", 0): 3, ("F1", 1): 3, ("B1", 1): 4, ("B1", 0): 5,
    }  # fmt: skip


def test_microbatches_past_the_last_are_left_out():
    orders = [[Work(F, 0), Work(F, 1), Work(B, 0), Work(B, 1)]]
    assert from_orders(orders, 1, Chunks(1)).orders() == [[Work(F, 0), Work(B, 0)]]


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_table_gives_its_orders_back(microbatches):
    orders = [[Work(F, i) for i in range(microbatches)] + [Work(B, i) for i in range(microbatches)]] * 3
    assert from_orders(orders, microbatches, Chunks(3)).orders() == orders
