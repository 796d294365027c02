"""What two real processes know alike."""

import pytest

from axon.launch.agree import AgreedStop, largest
from axon.launch.signals import Interrupted, Interrupts

SCRIPT = """
import signal, time
from axon.launch.agree import AgreedStop, largest, process_0_first
from axon.launch.signals import Interrupts

told["largest"] = [int(largest(value)) for value in (7 * me, 5 - me, 3)]

told["inside"] = []
for _ in range(2):
    with process_0_first("a test"):
        began = time.time()
        time.sleep(0.3)
        told["inside"].append([began, time.time()])

for behind in (0, 1):
    with Interrupts() as interrupts:
        stop = AgreedStop(interrupts)
        for step in range(1, 100):
            if me == 1 and step == 5:
                signal.raise_signal(signal.SIGTERM)
            if stop.ask(behind):
                break
        told[f"stopped {behind}"] = [step, stop.requested]
"""


@pytest.fixture(scope="module")
def told(two_processes):
    return two_processes(SCRIPT)


def test_the_largest_value_is_known_to_all(told):
    assert told[0]["largest"] == told[1]["largest"] == [7, 5, 3]


def test_the_others_begin_when_process_0_is_done(told):
    for (_, left), (entered, _) in zip(told[0]["inside"], told[1]["inside"], strict=True):  # and every time anew
        assert entered >= left


@pytest.mark.parametrize("behind", [0, 1])
def test_one_interrupted_process_stops_all_at_the_same_step(told, behind):
    assert told[0][f"stopped {behind}"] == told[1][f"stopped {behind}"] == [5 + behind, 15]


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
