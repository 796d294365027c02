"""Whether this process is one of several, decided from the environment before JAX looks for devices."""

import ctypes
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon.errors import UserError
from axon.launch.signals import forwarded_signal

HEARTBEAT_SECONDS = 15
"""A process without a heartbeat for so long counts as dead; JAX then ends the others with a message that names it."""

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_ADDRESS = re.compile(r"\S+:(?P<port>\d{1,5})")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Process:
    """One of the processes of a run.

    Args:
        index: 0 to `count` - 1; process 0 writes the run's files.
        coordinator: `host:port` of the coordination service, in process 0; None where JAX finds it itself, in Slurm.
        launcher: the pid of the `axon` that started this process and watches it; None if something else did.
    """

    index: int
    count: int
    coordinator: str | None = None
    launcher: int | None = None

    @classmethod
    def found(cls, environ: Mapping[str, str]) -> "Process | None":
        """From `AXON_PROCESS` and the other variables of `environment`, else from a Slurm step of several tasks, else
        None."""
        if "AXON_PROCESS" in environ:
            return cls(
                _number(environ, "AXON_PROCESS"),
                _number(environ, "AXON_PROCESSES"),
                _address(environ, "AXON_COORDINATOR") if "AXON_COORDINATOR" in environ else None,
                _number(environ, "AXON_LAUNCHER") if "AXON_LAUNCHER" in environ else None,
            )
        if all(name in environ for name in _SLURM) and _number(environ, "SLURM_NTASKS") > 1:
            return cls(_number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS"))
        return None

    def environment(self) -> dict[str, str]:
        """The environment variables from which `found` returns this process."""
        values = {
            "AXON_PROCESS": self.index,
            "AXON_PROCESSES": self.count,
            "AXON_COORDINATOR": self.coordinator,
            "AXON_LAUNCHER": self.launcher,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def join(self) -> None:
        """Connect to the other processes; from here on `jax.devices()` are those of all of them.

        To be called once, before anything asks for a device. Raises `UserError` if that fails.
        """
        import jax

        if self.launcher is not None:
            die_with_parent(self.launcher)
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from `Interrupts`
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, **self._coordination())
        except (RuntimeError, ValueError) as error:
            where = f" at {self.coordinator}" if self.coordinator else ""
            raise UserError(
                f"process {self.index} of {self.count} could not connect to the others{where}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        from axon.launch.agree import check_alike

        check_alike("environment", lambda: {"AXON_PROCESSES": str(self.count)})

    def _coordination(self) -> dict[str, Any]:
        if self.coordinator is None:
            return {}
        own = {} if self.launcher is None else {"coordinator_bind_address": self.coordinator}  # not on other interfaces
        return {
            "coordinator_address": self.coordinator,
            "num_processes": self.count,
            "process_id": self.index,
            "cluster_detection_method": "deactivate",
            **own,
        }


def _address(environ: Mapping[str, str], name: str) -> str:
    found = _ADDRESS.fullmatch(environ[name])
    if not found or not 0 < int(found["port"]) < 2**16:
        raise UserError(f"the environment variable {name} is {environ[name]!r}; expected host:port, as in node3:4000")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UserError(f"the environment variable {name} is {text!r}; expected a number")
    return int(text)


def die_with_parent(launcher: int) -> None:
    """Ask the kernel to kill this process when the launcher ends, however it ends.

    Ctrl-C in a terminal signals every process of the group: it is ignored here, and the launcher forwards it instead.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(forwarded_signal(signal.SIGINT), signal.default_int_handler)
