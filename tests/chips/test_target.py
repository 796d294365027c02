"""Machines by name."""

import pytest

from axon.chips import CHIPS
from axon.chips.target import Target
from axon.errors import UserError


def of(name):
    return Target.of(name, dict(CHIPS))


@pytest.mark.parametrize(
    ("name", "chip", "devices", "linked"),
    [
        ("v5p:16x16x16", "v5p", 4096, 4096),
        ("2*v5e:16x16", "v5e", 512, 256),
        ("tpu7x:2x2x1", "tpu7x", 8, 8),
        ("h100:2048x8", "h100", 16384, 8),
        ("h200:64", "h200", 64, 8),
        ("b200:4", "b200", 4, 4),
        ("l4:1", "l4", 1, 1),
    ],
)
def test_a_name_says_chips_and_how_they_are_linked(name, chip, devices, linked):
    target = of(name)
    assert (target.chip.name, target.devices, target.linked) == (chip, devices, linked)
    assert target.platform == ("tpu" if CHIPS[chip].torus else "gpu")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("h10:8", "Did you mean 'h100'"),
        ("v5p", "v5p:4x4x4"),
        ("h100:many", "h100:16x8"),
        ("v5p:4x4", "v5p:4x4x4"),
        ("v5e:0x4", "v5e:4x4"),
        ("h100:2x2x2", "h100:16x8"),
        ("h100:12", "multiple of 8"),
        ("h100:2x16", "has 8 GPUs"),
        ("2*h100:8", "slices of TPUs"),
        ("l4:8", "links of l4"),
    ],
)
def test_a_wrong_name_is_answered_with_a_right_one(name, part):
    with pytest.raises(UserError, match=r"target.*--on") as raised:
        of(name)
    assert part in str(raised.value)


@pytest.mark.parametrize("name", ["v5p:4x4x8", "v5e:4x4", "h100:2", "h100:4x8", "2*v5e:4x4"])
def test_a_doubled_machine_has_twice_the_devices_and_a_name_of_its_own(name):
    doubled = of(name).doubled()
    assert doubled.devices == 2 * of(name).devices
    assert of(doubled.name) == doubled


@pytest.mark.parametrize(
    ("name", "devices", "resized"),
    [
        ("v5p:16x16x16", 64, "v5p:4x4x4"),
        ("v5p:16x16x16", 128, "v5p:4x4x8"),
        ("v5p:16x16x16", 4096, "v5p:16x16x16"),
        ("v5e:16x16", 1024, "4*v5e:16x16"),
        ("2*v5e:16x16", 1, "v5e:1x1"),
        ("tpu7x:4x4x4", 64, "tpu7x:2x4x4"),
        ("h100:2048x8", 64, "h100:8x8"),
        ("h100:2048x8", 4, "h100:1x4"),
        ("h200:2x4", 16, "h200:4x4"),
    ],
)
def test_a_machine_of_another_size_is_a_part_of_a_slice_or_several_or_other_hosts(name, devices, resized):
    made = of(name).resized(devices)
    assert (made.name, made.devices) == (resized, devices)
    assert of(resized) == made


@pytest.mark.parametrize(("name", "devices"), [("v5p:4x4x4", 24), ("v5p:4x4x4", 96), ("h100:2x8", 12)])
def test_a_number_of_devices_that_no_such_machine_has_is_refused(name, devices):
    with pytest.raises(UserError, match=rf"{devices} .*{name}"):
        of(name).resized(devices)
