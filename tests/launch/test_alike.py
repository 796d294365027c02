"""Processes that are to do different things end, all of them, before they compile anything."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axon.launch.agree import check_alike
from axon.own_code import own_modules

TINY = (Path(__file__).parents[1] / "tiny.gin").read_text()
OWN = "from dataclasses import dataclass\nfrom axon.train.optimizers import AdamW, Constant\n\n"
OWN += "def mine():\n    return AdamW(Constant({}))\n"


def test_each_of_two_processes_is_told_every_field_that_differs_and_both_values(told):
    for process in told:
        assert process["alike"]["same"] == ""
        lines = process["alike"]["differing"].splitlines()
        assert lines[1:3] == ["  b: 0 in process 0, 1 in process 1", "  c: absent in process 0, @C() in process 1"]


def test_one_process_alone_compares_nothing():
    check_alike("nothing", lambda: pytest.fail("is not called"))


def test_a_persons_own_modules_are_compared_by_their_content(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_to_compare.py").write_text("A = 1\n")
    __import__("mine_to_compare")
    before = own_modules()
    (tmp_path / "mine_to_compare.py").write_text("A = 2\n")
    after = own_modules()
    assert {name for name in after if after[name] != before[name]} == {"mine_to_compare"}
    assert not {name for name in after if name.partition(".")[0] in ("axon", "models", "numpy", "os")}


def by_hand(folder: Path, environment, *, others: tuple[str, ...] = (), count: str = "2", lib: bool = False):
    """Exit codes and outputs of processes 0 and 1 of a training, of which process 1 has other arguments, and the
    seconds between their ends."""
    port, begun = 20000 + os.getpid() % 10000, []
    for index in range(2):
        own = {"AXON_PROCESS": f"{index}", "AXON_PROCESSES": count if index else "2"}
        own |= {"AXON_COORDINATOR": f"127.0.0.1:{port}"}
        own |= {"PYTHONPATH": os.pathsep.join([f"{folder}/{index}", os.environ.get("PYTHONPATH", "")])} if lib else {}
        command = [sys.executable, "-c", "from axon.cli import main; main()", "train", "run.gin", "--run-dir", "run"]
        command += ["--steps", "2", *(others if index else ())]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        begun.append(subprocess.Popen(command, cwd=folder, env=environment(1) | own, **pipes))
    outputs, ends = [], []
    for process in begun:
        outputs.append(process.communicate(timeout=200)[0])
        ends.append(time.monotonic())
    return [process.returncode for process in begun], outputs, ends[1] - ends[0]


def check_refused(folder: Path, environment, says: str, **different) -> None:
    codes, outputs, apart = by_hand(folder, environment, **different)
    assert codes == [2, 2], outputs
    assert apart < 10
    for output in outputs:
        assert says in output
        assert "Traceback" not in output
    assert not (folder / "run/metrics.jsonl").exists()


@pytest.mark.full
def test_processes_started_by_hand_with_other_rates_both_end_and_name_the_field(tmp_path, environment):
    (tmp_path / "run.gin").write_text(TINY)
    says = "optimizer.schedule.peak: 0.01 in process 0, 0.5 in process 1"
    check_refused(tmp_path, environment, says, others=("--set", "Cosine.peak=0.5"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("others", "says"),
    [
        (("--set", "Train.steps=7"), "steps: 600 in process 0, 7 in process 1"),
        (("--set", "Train.seed=7"), "seed: 0 in process 0, 7 in process 1"),
        (("--set", "Execution.remat='full'"), "execution.remat: 'none' in process 0, 'full' in process 1"),
        (("--steps", "1"), "--steps: 2 in process 0, 1 in process 1"),
        (("--set", "Llama.layer=7"), "Llama has no field 'layer'"),
        (("--set", "Folder.path='b'"), "the digest of data.sources[0]: "),
        (("--set", "Folder.path='none'"), "There is no file or folder"),
    ],
)
def test_whatever_a_process_is_to_do_otherwise_ends_both(others, says, tmp_path, environment):
    text = TINY.replace("@Synthetic()", "@Folder()").replace("Synthetic.vocab = 40\nSynthetic.documents = 100\n", "")
    (tmp_path / "run.gin").write_text(text + "Folder.path = 'a'\n")
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(60):
            (tmp_path / f"{name}/{number}.txt").write_text(f"{name} {number} alpha beta " * 50)
    check_refused(tmp_path, environment, says, others=others)


@pytest.mark.full
def test_code_of_ones_own_that_differs_ends_both(tmp_path, environment):
    (tmp_path / "run.gin").write_text("import mine\n" + TINY.replace("@AdamW()", "@mine()").partition("AdamW.sch")[0])
    for index, rate in enumerate((0.1, 0.2)):
        (tmp_path / f"{index}").mkdir()
        (tmp_path / f"{index}/mine.py").write_text(OWN.format(rate))
    check_refused(tmp_path, environment, "the code of mine: ", lib=True)


@pytest.mark.full
def test_processes_that_count_themselves_otherwise_end_both(tmp_path, environment):
    (tmp_path / "run.gin").write_text(TINY)
    check_refused(tmp_path, environment, "AXON_PROCESSES: 2 in process 0, 3 in process 1", count="3")


@pytest.mark.full
def test_paths_may_differ_where_what_is_there_is_the_same(tmp_path, environment):
    (tmp_path / "run.gin").write_text(TINY)
    (tmp_path / "link").symlink_to("run")
    codes, outputs, _ = by_hand(tmp_path, environment, others=("--run-dir", "link"))
    assert codes == [0, 0], outputs
