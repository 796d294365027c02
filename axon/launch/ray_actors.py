"""`RayActors`, which serve a `Lobby` on the machines of a Ray cluster."""

import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from axon.errors import UserError
from axon.launch.lobby import join
from axon.launch.worker import python_path

CONNECT_SECONDS, END_SECONDS = 10.0, 5.0
"""The time limits until a cluster's head answers, and for actors to end before they are killed."""


class RayActors:
    """Actors of a Ray cluster, each of which serves the `Lobby` that writes a file, until `close`.

    The cluster is that of `RAY_ADDRESS`, or the one that this machine belongs to, else one of this machine alone that
    ends with this object. Ray starts an actor anew that has died, on whichever machine has room.

    Args:
        file: the lobby's, under the same path on all machines. count: how many. resources: what Ray is to keep free
            for each, as {'GPU': 1}; a GPU is then in its CUDA_VISIBLE_DEVICES. report: called with a line where the
            cluster does not have them.
    """

    def __init__(self, file: Path, count: int, resources: Mapping[str, float], report: Callable[[str], None]):
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise UserError("Samplers.ray needs ray: pip install 'axon-jax[ray]'") from None
        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            self._connect()
        for line in missing(ray.cluster_resources(), count, resources):
            report(line)
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        options = {
            "max_restarts": -1,
            "max_task_retries": -1,
            "runtime_env": {"env_vars": {"PYTHONPATH": python_path()}},
        }
        kind = ray.remote(
            num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), resources=others, **options
        )(_Joining)
        self._actors = [kind.remote() for _ in range(count)]
        self._joining = [actor.join.remote(str(file)) for actor in self._actors]

    def close(self) -> None:
        """End the actors, and what each has started; those whose lobby is closed end by themselves."""
        self._ray.wait(self._joining, num_returns=len(self._joining), timeout=END_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()

    def _connect(self) -> None:
        _check_there(os.environ.get("RAY_ADDRESS", ""))
        handler = signal.getsignal(signal.SIGTERM)  # Ray takes it, and a run has one of its own
        try:
            self._ray.init(include_dashboard=False, logging_level="WARNING")
        finally:
            signal.signal(signal.SIGTERM, handler)


class _Joining:
    def join(self, file: str) -> None:
        join(Path(file), print)


def _check_there(address: str) -> None:
    """Ray itself asks for many minutes where nobody answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:  # 'auto', 'local', or none
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"Samplers.ray: RAY_ADDRESS is {address}, where no Ray cluster answers ({error}): give the address of its "
            "head, as '10.0.0.1:6379', or none for that of this machine"
        ) from None


def missing(there: Mapping[str, float], count: int, wanted: Mapping[str, float]) -> list[str]:
    """Lines about what a cluster does not have for so many actors."""
    return [
        f"Samplers.ray asks for {count} times {amount:g} {name}, and the Ray cluster has {there.get(name, 0):g}: what "
        "is missing is waited for"
        for name, amount in wanted.items()
        if there.get(name, 0) < count * amount
    ]
