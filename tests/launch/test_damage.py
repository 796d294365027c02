"""Checkpoints of two real processes: each writes the checksums of its own files, and both know what is damaged."""

import re


def test_each_process_writes_its_part_and_both_find_what_one_flipped(told):
    one, other = (process["damage"] for process in told)
    assert one == other
    assert one["intact"] == [[], []]
    assert one["parts"] == ["process_0.json", "process_1.json"]
    (said,) = one["notices"]
    assert said.startswith("checkpoint 2 is damaged: w in state/ocdbt.process_1/d/")
    assert said.endswith("continuing from step 1")
    assert one["steps"] == [1]


def test_both_restore_the_newest_of_two_folders_and_refuse_a_local_one_not_shared_or_not_writable(told):
    for process in told:
        tiers = process["tiers"]
        assert (tiers["steps"], tiers["extra"], tiers["same"]) == ([1, 2], {"step": 2}, True)
        assert "which the processes of this run do not share" in tiers["own"]
        said = r"cannot write .*/file: .*\. Set Checkpoints\.local_folder to another folder"
        assert re.fullmatch(said, tiers["unwritable"])
