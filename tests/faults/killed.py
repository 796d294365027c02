"""Trains the run of a configuration, killing it at random moments. Run with: CONFIG FOLDER KILLS PROCESSES SEED.

Each start is so many processes, forked before JAX has a backend: what takes longest, importing, is done once. Prints a
line of JSON for each start: the step that it went on from, the last step that it logged, the latest checkpoint, and the
exit code, None if it was killed. (Others than the one killed first may end by themselves, as they see it.)
"""

import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from poison import Held

from axon.checkpoint import Reader
from axon.config import load
from axon.launch.cluster import Process
from axon.launch.ending import shutdown_gracefully
from axon.observe.metrics import read_metrics
from axon.run import Train, run

TAIL = 4096
"""Bytes at the end of a file that have its last line."""


def start(train: Train, processes: int, to_its_end: bool) -> list[int]:
    """The pids of processes that train together, and wait before the last step unless they may come to the end."""
    train = train if to_its_end else replace(train, trackers=(Held(train.steps - 1),))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [_forked(train, Process(index, processes, address, os.getpid())) for index in range(processes)]


def _forked(train: Train, process: Process) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(train.folder.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            if process.count > 1:
                os.environ.update(process.environment())
                process.join()
            run(train)
            shutdown_gracefully()
            code = 0
    finally:
        os._exit(code)


def wait_for(step: int, folder: Path, pids: Sequence[int], seconds: float = math.inf) -> None:
    """Return once this start has logged that step, one of its processes has ended, or so much time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not _has_ended(pids):
        if _trains(folder, pids[0]) and _last_step(folder) >= step:
            break
        time.sleep(0.005)


def _has_ended(pids: Sequence[int]) -> bool:
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids)


def _trains(folder: Path, pid: int) -> bool:
    """Whether the metrics are of this start, which drops those of steps that it does again before it compiles."""
    mine = False
    for event in _tail(folder / "events.jsonl"):
        if event["kind"] == "start":
            mine = event["pid"] == pid
        elif event["kind"] == "compile_begin" and mine:
            return True
    return False


def _last_step(folder: Path) -> int:
    return max((record["step"] for record in _tail(folder / "metrics.jsonl") if "loss" in record), default=0)


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file of them."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    return [json.loads(line) for line in lines[1 if start else 0 :]]


def kill(pids: Sequence[int], draw: random.Random) -> None:
    """Kill one of them, and then the others, as their launcher does, which finds one dead within 50 ms."""
    first = draw.choice(pids)
    os.kill(first, signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.05) if len(pids) > 1 else 0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def main(config: str, folder: Path, kills: int, processes: int, seed: int) -> None:
    train = replace(load(Path(config), []).tree, run_dir=str(folder))
    draw = random.Random(seed)
    reader, every = Reader(folder / "checkpoints"), train.checkpoints.every
    for left in range(kills, -1, -1):
        begun = reader.latest() or 0
        pids = start(train, processes, to_its_end=not left)
        # On average a start gets on by less than its share of the steps, so that kills come everywhere.
        share = max(2, 2 * train.steps // (3 * max(kills, 1)) + every)
        if left and draw.random() < 0.2:
            wait_for(begun + share, folder, pids, seconds=draw.uniform(0, 3.0))  # while it begins, mostly
        elif left:
            wait_for(min(begun + draw.randrange(1, share), train.steps - 1), folder, pids)
            time.sleep(draw.uniform(0, 0.1))
        by_itself = not left or _has_ended(pids)
        if left:
            kill(pids, draw)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        code = next((code for code in codes if code != -signal.SIGKILL), None) if by_itself else None
        steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
        here = {"from": begun, "reached": max(steps, default=0), "latest": reader.latest() or 0, "code": code}
        print(json.dumps(here), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
