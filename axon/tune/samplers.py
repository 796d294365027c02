"""`Samplers`, processes that sample a run's answers while it trains."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import ClassVar

import jax

from axon.checks import check_range
from axon.errors import UserError
from axon.launch.agree import object_from_process_0
from axon.launch.lobby import Lobby, parsed_address
from axon.launch.ray_actors import RayActors
from axon.launch.worker import Remote, Worker, WorkerError
from axon.train.state import State
from axon.tune.episodes import Episode
from axon.tune.sampler_setup import SamplerSetup
from axon.tune.starts import Start
from axon.tune.weight_versions import WeightVersions

ATTEMPTS = 3
"""How many processes are asked for the same answers."""

LOBBY = "samplers.json"
"""The file of a run's folder by which processes that sample come to it."""


@dataclass(frozen=True)
class Samplers:
    """Processes that sample a run's answers, each with an engine on devices of its own.

    Args:
        processes: how many; each has a share of a batch's prompts.
        devices: for each the GPUs that it sees, as `CUDA_VISIBLE_DEVICES` names them, of which the run itself sees
            none; none on CPUs.
        address: HOST:PORT of the run's first process, to which processes come that `axon sample` starts, on this
            machine or others that see the run's folder; empty: the run starts them itself, on its first machine.
        ray: what each process has of a Ray cluster, as {'GPU': 1}, which starts them and comes to `address`; None: not
            by Ray.
        limit: seconds for a share of a batch, in the first of which the engine is compiled. A process that takes longer
            is ended, and another is asked; and seconds that the run waits for one to come.
    """

    processes: int = 1
    devices: tuple[str, ...] = ()
    address: str = ""
    ray: Mapping[str, float] | None = None
    limit: float = 900.0

    def __post_init__(self):
        check_range(self, "[1, 1024]", "processes")
        check_range(self, "(0, 1e6]", "limit")
        if self.address:
            parsed_address(self.address)
        if self.ray is not None and not self.address:
            raise UserError(
                "Samplers.ray is set, and Samplers.address is not: give the address to which Ray's processes come, as "
                "'10.0.0.1:7000', or '0.0.0.0:0' for this machine's name and any port that is free"
            )
        if self.ray is not None and any(amount < 0 for amount in self.ray.values()):
            raise UserError(f"Samplers.ray is {dict(self.ray)!r}: each resource must be 0 or more")
        if self.devices and self.address:
            raise UserError(
                "Samplers.devices is set, and Samplers.address: each process that comes has the devices of its own "
                "environment. Leave one of the two out"
            )
        if self.devices and len(self.devices) != self.processes:
            raise UserError(
                f"Samplers.devices has {len(self.devices)} entries, and Samplers.processes is {self.processes}: give "
                "one for each process"
            )

    def check(self, platform: str) -> None:
        """Raise `UserError` where a run of this platform cannot start them."""
        if self.address:
            return
        if platform == "gpu" and not self.devices:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
            raise UserError(
                f"Rollouts.samplers is set without Samplers.devices, and this run has the GPUs {shown}: start it with "
                "CUDA_VISIBLE_DEVICES naming fewer, and set Samplers.devices to others, as ('7',)"
            )
        if platform not in ("cpu", "gpu"):
            raise UserError(
                f"Rollouts.samplers is set, and the run is on {platform}s, which one process of a machine has: set "
                "Samplers.address, and start `axon sample` on other machines; or leave it out, and the engine takes "
                "turns with the step"
            )

    def environ(self, place: int) -> dict[str, str]:
        """What a process's environment has besides."""
        return {"CUDA_VISIBLE_DEVICES": self.devices[place]} if self.devices else {}


class SamplerProcesses:
    """Plays episodes in the processes of `samplers`, while this one does something else. Of several processes of a run
    the first has them, and all have their episodes.

    Args:
        setup: what they sample by. versions: where they find the weights. samples: episodes in a row that are one
            process's, as those of a prompt. report: called with a line for each process that had to be replaced.
    """

    beside: ClassVar[bool] = True

    def __init__(
        self,
        samplers: Samplers,
        setup: SamplerSetup,
        versions: WeightVersions,
        samples: int,
        report: Callable[[str], None],
    ):
        self._versions, self._samples, self._each = versions, samples, list[_Place]()
        self._lobby, self._actors = None, None
        if jax.process_index() > 0:
            return
        if samplers.address:
            file = versions.directory.parent / LOBBY
            if samplers.ray is None:
                report(f"waits for {samplers.processes} processes of: axon sample {file.parent}")
            else:
                self._actors = RayActors(file.absolute(), samplers.processes, samplers.ray, report)
            self._lobby = Lobby(samplers.address, file)
        for place in range(samplers.processes):
            start = partial(Worker, setup.sampler, samplers.environ(place))
            if self._lobby is not None:
                start = partial(self._lobby.next, setup.sampler, samplers.limit)
            self._each.append(_Place(place, start, samplers.limit, report))

    def begin(self, state: State, starts: Sequence[Start]) -> Callable[[], list[Episode]]:
        version = self._versions.publish(state)
        if not self._each:
            return partial(object_from_process_0, "episodes", list[Episode])
        prompts, count = len(starts) // self._samples, len(self._each)
        ends = [self._samples * (prompts * place // count) for place in range(count + 1)]
        shares = [starts[first:end] for first, end in pairwise(ends)]
        wait = self._versions.wait
        begun = [one.begin(wait, version, share) for one, share in zip(self._each, shares, strict=True) if share]
        return partial(object_from_process_0, "episodes", lambda: [*chain.from_iterable(one.result() for one in begun)])

    def close(self) -> None:
        """End the processes, and what they are at."""
        if self._lobby is not None:
            self._lobby.close()
        for place in self._each:
            place.stop()
        for place in self._each:
            place.close()
        if self._actors is not None:
            self._actors.close()
        self._versions.close()


class _Place:
    """One process after another that samples, each as `start` returns it, and the thread that waits for it."""

    def __init__(self, place: int, start: Callable[[], Remote], limit: float, report: Callable[[str], None]):
        self._place, self._start, self._limit, self._report = place, start, limit, report
        self._thread, self._process, self._stopped = ThreadPoolExecutor(1), None, False

    def begin(self, wait: Callable[[], None], version: int, starts: Sequence[Start]) -> Future[list[Episode]]:
        """The episodes by the weights of a version, which are there after `wait`."""
        return self._thread.submit(self._played, wait, version, starts)

    def stop(self) -> None:
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def _played(self, wait: Callable[[], None], version: int, starts: Sequence[Start]) -> list[Episode]:
        wait()
        for _ in range(ATTEMPTS):
            try:
                episodes, lines = self._ready().call("play", version, starts, limit=self._limit)
            except (WorkerError, TimeoutError) as error:
                if self._stopped:
                    raise
                failed = f"sampler {self._place}: {error}"
                self._report(f"{failed}; its {len(starts)} answers are sampled again, by another process")
                continue
            for line in lines:
                self._report(line)
            return episodes
        raise UserError(
            f"{failed}: so did the {ATTEMPTS - 1} before it, with the same {len(starts)} answers by the weights of "
            f"step {version}. Its output is above; Samplers.limit is {self._limit:g} seconds"
        )

    def _ready(self) -> Remote:
        if self._process is None or not self._process.alive:
            if self._process is not None:
                self._process.close()
            self._process = self._start()
            if self._stopped:
                self._process.kill()
        return self._process
