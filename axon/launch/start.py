"""In how many processes a command runs, decided before JAX looks for devices."""

import os

from axon.errors import UserError
from axon.launch.cluster import Process
from axon.launch.local import launch
from axon.launch.restarts import is_supervised, obey_supervisor


def start(processes: int, port: int | None = None) -> int | None:
    """Join the other processes if this is one of several; or launch `processes` on this machine and wait for them.

    Returns their exit code, or None if this process is to run the command. Raises as `Process.join` and `launch`.
    """
    process = Process.found(os.environ)
    if process is None:
        if is_supervised(os.environ):
            obey_supervisor(os.environ)
        return launch(processes, port) if processes > 1 else None
    if processes > 1 and processes != process.count:
        raise UserError(
            f"--processes {processes}, and this is already process {process.index} of {process.count}: leave it out"
        )
    process.join()
    return None


def supervises(restarts: int) -> bool:
    """Whether this process is to start the command again when it dies, rather than to run it.

    Raises `UserError` for a process that something else than Axon started as one of several.
    """
    process = Process.found(os.environ)
    if restarts and process is not None and process.launcher is None:
        raise UserError(
            f"--restarts {restarts}: this is process {process.index} of {process.count}, and the others would not be "
            "started again with it. Leave it out, and let the scheduler start all of them again"
        )
    return restarts > 0 and process is None and not is_supervised(os.environ)
