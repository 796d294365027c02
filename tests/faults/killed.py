"""Trains the run of a configuration, killing it at random moments. Run with: CONFIG FOLDER KILLS SEED.

Each start is a process of its own, forked before JAX has a backend: what takes longest, importing, is done once. Prints
a line of JSON for each start: the step that it went on from, the last step that it logged, and the latest checkpoint.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from axon.checkpoint import Reader
from axon.config import load
from axon.observe.metrics import read_metrics
from axon.run import Train, run


def start(train: Train) -> int:
    """The pid of a process that trains."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(train.folder.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            run(train)
            code = 0
    finally:
        os._exit(code)


def logged(folder: Path) -> int:
    """The last step in the metrics."""
    return max((record["step"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record), default=0)


def wait(pid: int, folder: Path, kill_at: int, delay: float) -> int | None:
    """Kill it `delay` seconds after it has logged step `kill_at`; its exit code, if it ended before."""
    while logged(folder) < kill_at:
        if ended(pid) is not None:
            return os.waitstatus_to_exitcode(statuses[pid])
        time.sleep(0.002)
    time.sleep(delay)
    if ended(pid) is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(statuses[pid])


statuses: dict[int, int] = {}


def ended(pid: int) -> int | None:
    if pid not in statuses:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            statuses[pid] = status
    return statuses.get(pid)


def main(config: str, folder: Path, kills: int, seed: int) -> None:
    train = replace(load(Path(config), []).tree, run_dir=str(folder))
    draw = random.Random(seed)
    reader, every = Reader(folder / "checkpoints"), train.checkpoints.every
    for left in range(kills, -1, -1):
        begun = reader.latest() or 0
        pid = start(train)
        if not left:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            # On average a start gets on by less than its share of the steps, so that there are enough for all kills.
            ahead = draw.randrange(1, max(2, 2 * train.steps // (3 * kills) + every))
            early = draw.random() < 0.2
            code = wait(pid, folder, 0 if early else begun + ahead, draw.uniform(0, 3.0 if early else 0.1))
        here = {"from": begun, "reached": logged(folder), "latest": reader.latest() or 0, "code": code}
        print(json.dumps(here), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
