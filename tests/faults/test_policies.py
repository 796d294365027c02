"""A step that goes wrong: stopped at, skipped, or rolled back past, and the same decision everywhere."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from poison import Poisoned, hashes

from axon.checkpoint import Reader
from axon.layout import Layout
from axon.observe.lines import read_lines
from axon.run import program
from axon.train.faults import Faults, Spikes
from axon.train.loop import Diverged
from axon.train.replay import Replay, SilentCorruption


@pytest.fixture(scope="module")
def poisoned(short):
    """poisoned(*batches, times=None, **fields of Faults): the short run, in which these batches go wrong."""
    with short.data.prepare(str).train(short.seed) as batches:
        seen = [next(batches)["tokens"] for _ in range(short.steps)]

    def poison(*numbers: int, times: float | None = None, **faults):
        chosen = tuple(int(hashes(seen[number])[3]) for number in numbers)
        return replace(short, objective=Poisoned(hashes=chosen, times=times), faults=Faults(**faults))

    return poison


@pytest.mark.full
def test_a_run_that_may_skip_and_does_not_is_the_same_bit_for_bit(short, whole, do, tmp_path):
    ran = do(replace(short, faults=Faults("skip", Spikes(policy="skip", window=3))), tmp_path)
    assert ran.records("loss", "grad_norm", "learning_rate") == whole.records("loss", "grad_norm", "learning_rate")
    assert {skipped for _, skipped in ran.records("skipped")} == {0}
    assert not ran.events("skip", "not_finite", "spike")


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_skipped_step_changes_no_parameter_and_is_recorded_with_its_documents(poisoned, whole, do, few, tmp_path):
    train = replace(poisoned(5, not_finite="skip"), checkpoints=replace(whole.train.checkpoints, every=1, keep=8))
    ran = do(train, tmp_path, steps=8)
    assert ran.records("loss")[:5] == whole.records("loss")[:5]
    assert ran.records("loss", "skipped")[5] == [6, None, 1]
    assert all(np.isfinite(loss) for step, loss in ran.records("loss") if step != 6)
    reader, parts = Reader(tmp_path / "checkpoints"), {"parameters": None, "optimizer": None}
    with few(1):
        state = program(train).abstract_state()
    parts = {name: getattr(state, name) for name in parts}
    before, after, later = (jax.tree.leaves(reader.restore_parts(parts, step)) for step in (5, 6, 7))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((np.asarray(one) != np.asarray(other)).any() for one, other in zip(after, later, strict=True))
    (fault,) = ran.events("not_finite")
    assert (fault["step"], fault["batch"], fault["policy"]) == (6, 5, "skip")
    assert len(fault["documents"]) == train.data.batch
    assert [event["step"] for event in ran.events("skip")] == [6]


@pytest.mark.full
def test_more_skips_than_allowed_stop_the_run_and_spoil_nothing(poisoned, do, tmp_path):
    with pytest.raises(Diverged, match=r"3 steps were skipped, 2 of them in a row: more than") as stopped:
        do(poisoned(2, 5, 6, not_finite="skip", skips_in_a_row=1), tmp_path)
    assert str(stopped.value).startswith("step 7: loss nan")
    assert Reader(tmp_path / "checkpoints").latest() == 5


@pytest.mark.full
def test_a_rollback_goes_on_with_the_same_batches_but_those_of_the_fault(poisoned, whole, do, few, tmp_path):
    train = poisoned(7, not_finite="rollback")
    ran = do(train, tmp_path, steps=10)
    ran = do(train, tmp_path)
    left_out = [event["left_out"] for event in ran.events("rollback")]
    assert left_out == [[7]]
    assert [event["step"] for event in ran.events("rollback")] == [5]
    assert "left out since rollbacks: batches 7" in ran.lines
    assert ran.records("loss", "grad_norm") == expected(whole.train, [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12], few)


def expected(train, numbers, few):
    """Step, loss and gradient norm of steps on the batches with these numbers."""
    found = []
    with few(1):
        made = program(train)
        state = made.init()
    with train.data.prepare(str).train(train.seed) as batches:
        seen = [next(batches) for _ in range(max(numbers) + 1)]
    for step, number in enumerate(numbers, 1):
        state, metrics = made.step(state, made.place(seen[number]))
        found.append([step, float(metrics["loss"]), float(metrics["grad_norm"])])
    return found


@pytest.mark.full
def test_a_rollback_before_the_first_checkpoint_begins_anew_and_too_many_stop(poisoned, do, tmp_path):
    train = poisoned(2, 3, not_finite="rollback", rollbacks=1)
    with pytest.raises(Diverged, match=r"step 3: .*\n.*\n?.*rolled back 1 times already"):
        do(train, tmp_path)
    ran = do(replace(train, faults=Faults("rollback", rollbacks=2, leave_out=2)), tmp_path, steps=4)
    assert [(event["step"], event["left_out"]) for event in ran.events("rollback")] == [
        (0, [2]),
        (0, [1, 2]),
        (0, [0, 3]),
    ]
    assert [step for step, _ in ran.records("loss")] == [1, 2, 3, 4]


@pytest.mark.full
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_spike_is_found_by_loss_and_treated_alike(poisoned, do, tmp_path, policy):
    ran = do(poisoned(9, times=100.0, spikes=Spikes(window=5, policy=policy)), tmp_path, steps=11)
    (spike,) = ran.events("spike")
    assert (spike["step"], spike["batch"]) == (10, 9)
    assert all(loss < 7 for step, loss in ran.records("loss") if (policy, step) != ("skip", 10))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout({"data": 4, "tensor": 2}, zero=3), marks=pytest.mark.slow),
        pytest.param(Layout({"data": 2, "context": 2, "tensor": 2}, microbatches=2), marks=pytest.mark.slow),
        Layout({"pipe": 2, "data": 4}, microbatches=2, zero=1),
    ],
    ids=["zero and tensor", "context", "pipeline"],
)
def test_every_layout_skips_the_same_steps(poisoned, do, tmp_path, layout):
    train = poisoned(2, 5, not_finite="skip")
    train = replace(train, model=replace(train.model, layers=2), steps=8)
    one, other = (
        do(replace(train, layout=chosen), tmp_path / name, devices)
        for chosen, name, devices in ((train.layout, "one", 1), (layout, "other", 8))
    )
    assert one.records("skipped") == other.records("skipped")
    assert [step for step, skipped in one.records("skipped") if skipped] == [3, 6]
    losses = ([loss for _, loss in ran.records("loss") if loss is not None] for ran in (one, other))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_steps_done_twice_change_no_bit_of_the_losses_and_are_recorded(short, whole, do, tmp_path, policy):
    ran = do(replace(short, faults=Faults(policy, replay_every=3)), tmp_path)
    assert ran.records("loss", "grad_norm") == whole.records("loss", "grad_norm")
    replays = ran.events("replay")
    assert [event["step"] for event in replays] == list(range(3, short.steps + 1, 3))
    assert {event["differing"] for event in replays} == {0}


@pytest.mark.full
def test_a_device_that_computes_wrongly_ends_the_run_and_nothing_of_that_step_is_saved(
    short, do, tmp_path, monkeypatch
):
    results = iter([{}, {"parameters/head": [0]}])
    monkeypatch.setattr(Replay, "_differing", lambda *_: next(results))
    with pytest.raises(SilentCorruption, match=r"step 6.*\n  parameters/head: on devices 0"):
        do(replace(short, faults=Faults(replay_every=3)), tmp_path)
    assert Reader(tmp_path / "checkpoints").steps() == [5]
    record = [event for event in read_lines(tmp_path / "events.jsonl") if event["kind"] == "replay"][-1]
    assert (record["step"], record["differing"], record["arrays"]) == (6, 1, {"parameters/head": [0]})
