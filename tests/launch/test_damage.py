"""Checkpoints of two real processes: each writes the checksums of its own files, and both know what is damaged."""


def test_each_process_writes_its_part_and_both_find_what_one_flipped(told):
    one, other = (process["damage"] for process in told)
    assert one == other
    assert one["intact"] == [[], []]
    assert one["parts"] == ["process_0.json", "process_1.json"]
    (said,) = one["notices"]
    assert said.startswith("checkpoint 2 is damaged: w in state/ocdbt.process_1/d/")
    assert said.endswith("continuing from step 1")
    assert one["steps"] == [1]
