"""Collectives by the links that mesh axes run over."""

import json
from dataclasses import replace

import pytest

from axon.chips import CHIPS
from axon.chips.target import Target
from axon.errors import UserError
from axon.plan.predict.links import SHARE_OF_LINK, Bandwidths, Links

SIZE = 1e9


def links(name, **mesh):
    target = Target.of(name, dict(CHIPS))
    return Links(target, mesh, Bandwidths.of(target))


def test_a_gather_within_a_host_is_a_ring_over_its_links():
    found = links("h100:4x8", data=4, tensor=8).gather(("tensor",), SIZE)
    assert found == pytest.approx(7 / 8 * SIZE / (450e9 * SHARE_OF_LINK), rel=0.01)


def test_across_hosts_each_device_sends_its_own_part_over_the_network():
    one = links("h100:4x8", data=32)
    network, near = 3 / 4 * SIZE / 8 / (50e9 * SHARE_OF_LINK), 7 / 8 * SIZE / (450e9 * SHARE_OF_LINK)
    assert one.gather(("data",), SIZE) == pytest.approx(max(network, near), rel=0.02)
    strided = links("h100:4x8", data=4, tensor=8).gather(("data",), SIZE)
    assert strided == pytest.approx(3 / 4 * SIZE / (50e9 * SHARE_OF_LINK), rel=0.01)


def test_an_axis_over_more_dimensions_of_a_torus_has_more_links():
    line, plane, all_of = (links("v5p:8x8x8", data=512 // n, tensor=n).gather(("tensor",), SIZE) for n in (8, 64, 512))
    assert line == pytest.approx(7 / 8 * SIZE / (2 * 100e9 * SHARE_OF_LINK), rel=0.01)
    assert line > 1.7 * plane > 2.4 * all_of


def test_slices_are_linked_by_the_network_alone():
    within, across = (links(f"{n}v5e:4x4", replica=2, data=8 * (1 if n == "" else 2)) for n in ("", "2*"))
    assert across.gather(("replica",), SIZE) > 10 * within.gather(("replica",), SIZE)
    assert across.gather(("data",), SIZE) == pytest.approx(links("v5e:4x4", data=16).gather(("data",), SIZE))


@pytest.mark.parametrize("name", ["v5p:4x4x4", "h100:8x8"])
def test_nothing_along_no_axis_takes_no_time_and_more_bytes_take_longer(name):
    one = links(name, data=16, tensor=4)
    for collective in (one.gather, one.reduce, one.exchange):
        assert collective((), SIZE) == collective(("data",), 0.0) == 0
        assert collective(("data",), 2 * SIZE) > 1.9 * collective(("data",), SIZE)
    assert one.reduce(("tensor",), SIZE) == 2 * one.gather(("tensor",), SIZE)
    assert one.send("data", SIZE) > 0 == one.send("pipe", SIZE)


def test_across_hosts_alone_an_exchange_has_the_networks_latency():
    one = links("h100:4x8", data=4, tensor=8)
    slow = replace(one, bandwidths=replace(one.bandwidths, latency=1.0))
    assert slow.exchange(("data",), SIZE) == one.exchange(("data",), SIZE) < 1 < slow.exchange(("tensor",), SIZE)


def test_measured_bandwidths_replace_the_tables_one_by_one(tmp_path):
    path, target = tmp_path / "links.json", Target.of("h100:4x8", dict(CHIPS))
    path.write_text(json.dumps({"network": 2e10, "latency": 0}))
    found = Bandwidths.read(path, target)
    assert found == replace(Bandwidths.of(target), network=2e10, latency=0.0)
    across = Links(target, {"data": 4, "tensor": 8}, found).gather(("data",), SIZE)
    assert across == pytest.approx(3 / 4 * SIZE / 2e10, rel=0.01)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"netwrok": 1e9}, "Did you mean 'network'"),
        ({"link": 0}, "link is 0"),
        ({"link": "90 GB"}, 'link is "90 GB"'),
        ({"latency": -1}, "latency is -1"),
        ([], "must be an object"),
    ],
)
def test_a_file_that_is_no_bandwidths_is_refused(tmp_path, content, part):
    path = tmp_path / "links.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as raised:
        Bandwidths.read(path, Target.of("h100:4x8", dict(CHIPS)))
    assert str(path) in str(raised.value)
    assert part in str(raised.value)
