"""Which devices hold which part of a weight, as the picture tells it."""

import itertools
import math

import jax
import pytest
from jax.sharding import NamedSharding

from axon.layout import ArraySpec, Layout, Placement
from axon.show.shards import Shards, shown

MESHES = [{"data": 4, "tensor": 2}, {"replica": 2, "data": 2, "tensor": 2}, {"data": 8}]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("axes", ["embed mlp", "layers embed heads head_dim", "vocab embed", "embed"])
def test_every_part_is_on_the_devices_where_jax_puts_it(mesh, axes, rng):
    shape = tuple(8 * int(n) for n in rng.integers(1, 5, len(axes.split())))
    placement = Placement.of(Layout(mesh, zero=3), jax.devices())
    spec = ArraySpec(tuple(axes.split()), shape)
    shards = Shards.of(placement, spec)
    sharding = placement.sharding(spec.axes, "params")
    assert isinstance(sharding, NamedSharding)
    slices = sharding.devices_indices_map(shape)
    owners = {}
    for number, device in enumerate(placement.devices):
        owners.setdefault(tuple(s.indices(n) for s, n in zip(slices[device], shape, strict=True)), []).append(number)
    parts = itertools.product(range(shards.rows.num_shards), range(shards.columns.num_shards))
    assert sorted(shards.holders(*part) for part in parts) == sorted(owners.values())


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_has_the_colour_of_its_part_and_no_other_part_has_it(mesh):
    placement = Placement.described(Layout(mesh, zero=3), 8)
    shards = Shards.of(placement, ArraySpec(("embed", "mlp"), (64, 64)))
    colours = {}
    for places in itertools.product(*map(range, mesh.values())):
        device = dict(zip(mesh, places, strict=True))
        part = shards.rows.part(device), shards.columns.part(device)
        assert shards.number(device) in shards.holders(*part)
        colours[part] = shards.colour(*part)
    assert len(set(colours.values())) == len(colours) == shards.rows.num_shards * shards.columns.num_shards


def test_mesh_axes_that_cut_nothing_of_the_weight_hold_copies():
    placement = Placement.described(Layout({"replica": 2, "data": 4, "tensor": 2}, zero=3), 16)
    assert Shards.of(placement, ArraySpec(("embed", "mlp"), (64, 64))).copied == ("replica",)
    assert Shards.of(placement, ArraySpec(("embed",), (64,))).copied == ("replica", "tensor")


def test_of_many_places_the_first_and_the_last_are_shown(rng):
    count = int(rng.integers(9, 1000))
    assert shown(8) == list(range(8))
    places = shown(count)
    assert len(places) == 8
    assert places[:6] == list(range(6))
    assert places[6:] == [None, count - 1]
    assert math.prod(len(shown(count, most)) for most in (3, 5)) == 15
