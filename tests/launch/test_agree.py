"""What two real processes know alike."""

import pytest

from axon.launch.agree import AgreedStop, largest
from axon.launch.signals import Interrupted, Interrupts


@pytest.fixture
def agreed(told):
    return [process["agreement"] for process in told]


def test_the_largest_value_is_known_to_all(agreed):
    assert agreed[0]["largest"] == agreed[1]["largest"] == [7, 5, 3]


def test_the_others_begin_when_process_0_is_done(agreed):
    for (_, left), (entered, _) in zip(agreed[0]["inside"], agreed[1]["inside"], strict=True):  # and every time anew
        assert entered >= left


@pytest.mark.parametrize("behind", [0, 1])
def test_one_interrupted_process_stops_all_at_the_same_step(agreed, behind):
    assert agreed[0][f"stopped {behind}"] == agreed[1][f"stopped {behind}"] == [5 + behind, 15]


def test_alone_it_agrees_with_itself():
    assert int(largest(4)) == 4
    with Interrupts() as interrupts:
        stop = AgreedStop(interrupts)
        assert not stop.ask()
        interrupts.requested = 2
        stop.check()  # nobody has asked since
        assert stop.ask()
        with pytest.raises(Interrupted, match="SIGINT"):
            stop.check()
        interrupts.requested = None
