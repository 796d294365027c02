"""What two real processes know alike."""

import numpy as np
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


def test_a_reward_is_asked_in_the_first_process_alone_and_all_have_what_it_says(told):
    (first, first_lines, _), (second, second_lines, keys) = (process["rewards"] for process in told)
    np.testing.assert_array_equal(first, second)
    assert (first_lines, second_lines) == (3, 0)
    for begin, (failing, other, total) in enumerate(first):
        ids = begin + np.arange(4)
        np.testing.assert_allclose(failing, np.where(ids % 2, np.nan, 0.1 * ids), rtol=0, atol=1e-15)
        np.testing.assert_allclose(other, 0.1 * ids, rtol=0, atol=1e-15)
        np.testing.assert_array_equal(total, np.array(failing) + 2 * np.array(other))
    assert keys <= 6  # of the last two agreements at most, each a value and what says that it was read
