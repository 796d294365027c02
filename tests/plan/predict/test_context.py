"""What attention over split sequences sends and merges, by how it sees them whole."""

import math

import pytest
from planning import SIZES, program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.plan.predict.context import Context
from axon.plan.predict.links import Bandwidths, Links
from axon.plan.predict.seconds import CONTEXT, ELEMENTWISE, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work

RATE = 1e9
HEADS, KV, DIM = SIZES["heads"], SIZES["kv_heads"], SIZES["head_dim"]


@pytest.fixture(scope="module")
def work():
    return Work.of(program(batch=8, seq=4096))


def shards(work, method, remat="none", **mesh):
    layout = Layout(mesh=mesh, context=method)
    return Shards(Split(work, Placement.described(layout, 8, "gpu")), layout, Execution(remat=remat))


def sent(work, method, remat="none", **mesh):
    """Bytes that a device sends in a layer, and those that a ring sends while it computes."""
    one, target = shards(work, method, remat, **mesh), Target.of("h100:8", dict(CHIPS))
    links = Links(target, mesh, Bandwidths(RATE, RATE, RATE, 0.0, 0.0))
    return [RATE * time for time in Context(one).seconds(0, links)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_is_sent_is_what_each_method_sends(work, size):
    """By docs/parallelism.md, of bfloat16: `KV` and `Q` elements a token, `n` devices."""
    mesh = {"data": 8 // size, "context": size}
    whole, keys = 2 * 4096 * size, 2 * KV * DIM  # a device's share of the batch is of as many whole sequences
    gathered = (size - 1) / size * whole * keys
    ring, around = sent(work, "ring", **mesh)
    assert ring == around == pytest.approx(3 * gathered)
    assert sent(work, "gather", **mesh) == [pytest.approx(3 * gathered), 0]
    copied = math.lcm(KV, size)
    swapped = 2 * (size - 1) / size * 2 * 4096 * (HEADS + copied) * DIM
    assert sent(work, "ulysses", **mesh) == [pytest.approx(2 * swapped), 0]
    assert sent(work, "ulysses", "minimal", **mesh) == [pytest.approx(3 * swapped), 0]


def test_both_send_the_sum(work):
    both, around = sent(work, "usp", context=4, ulysses=2)
    assert 0 < around < both
    assert around == pytest.approx(sent(work, "ring", context=4, data=2)[0])


def test_a_ring_alone_merges(work):
    def elementwise(method, **mesh):
        return seconds(shards(work, method, **mesh), Target.of("h100:8", dict(CHIPS))).of(ELEMENTWISE)

    ring, both = elementwise("ring", context=8), elementwise("usp", context=4, ulysses=2)
    other = elementwise("ulysses", context=8)
    assert ring > both > other == elementwise("gather", context=8)


def test_no_work_hides_an_exchange(work):
    target = Target.of("h100:8", dict(CHIPS))
    (line,) = (one for one in seconds(shards(work, "ulysses", context=8), target).lines if one.name == CONTEXT)
    assert line.exposed == line.seconds > 0
