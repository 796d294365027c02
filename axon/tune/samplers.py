"""`Samplers`, processes that sample a run's answers while it trains."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise

import jax

from axon.checks import check_range
from axon.errors import UserError
from axon.launch.worker import Worker, WorkerError
from axon.train.state import State
from axon.tune.episode_runner import Start
from axon.tune.episodes import Episode
from axon.tune.sampler_setup import SamplerSetup
from axon.tune.weight_versions import WeightVersions

ATTEMPTS = 3
"""How many processes are asked for the same answers."""


@dataclass(frozen=True)
class Samplers:
    """Processes of this machine that sample a run's answers, each with an engine on devices of its own.

    Args:
        processes: how many; each has a share of a batch's prompts.
        devices: for each the GPUs that it sees, as `CUDA_VISIBLE_DEVICES` names them, of which the run itself sees
            none; none on CPUs.
        limit: seconds for a share of a batch, in the first of which the engine is compiled. A process that takes longer
            is ended, and another is asked.
    """

    processes: int = 1
    devices: tuple[str, ...] = ()
    limit: float = 900.0

    def __post_init__(self):
        check_range(self, "[1, 64]", "processes")
        check_range(self, "(0, 1e6]", "limit")
        if self.devices and len(self.devices) != self.processes:
            raise UserError(
                f"Samplers.devices has {len(self.devices)} entries, and Samplers.processes is {self.processes}: give "
                "one for each process"
            )

    def check(self, platform: str) -> None:
        """Raise `UserError` where a run of this platform cannot have them."""
        if (count := jax.process_count()) > 1:
            raise UserError(
                f"Rollouts.samplers is set, and the run has {count} processes, which would each start them: train in "
                "one process, or leave it out"
            )
        if platform == "gpu" and not self.devices:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
            raise UserError(
                f"Rollouts.samplers is set without Samplers.devices, and this run has the GPUs {shown}: start it with "
                "CUDA_VISIBLE_DEVICES naming fewer, and set Samplers.devices to others, as ('7',)"
            )
        if platform not in ("cpu", "gpu"):
            raise UserError(
                f"Rollouts.samplers is set, and the run is on {platform}s, which one process of a machine has: leave "
                "it out, and the engine takes turns with the step"
            )

    def environ(self, place: int) -> dict[str, str]:
        """What a process's environment has besides."""
        return {"CUDA_VISIBLE_DEVICES": self.devices[place]} if self.devices else {}


class SamplerProcesses:
    """Plays episodes in the processes of `samplers`, while this one does something else.

    Args:
        setup: what they sample by. versions: where they find the weights. samples: answers to a prompt, which are one
            process's. report: called with a line for each process that had to be replaced.
    """

    def __init__(
        self,
        samplers: Samplers,
        setup: SamplerSetup,
        versions: WeightVersions,
        samples: int,
        report: Callable[[str], None],
    ):
        self._versions, self._samples = versions, samples
        self._each = [_Place(samplers, place, setup, report) for place in range(samplers.processes)]

    def begin(self, state: State, starts: Sequence[Start]) -> Callable[[], list[Episode]]:
        version = self._versions.publish(state)
        prompts, count = len(starts) // self._samples, len(self._each)
        ends = [self._samples * (prompts * place // count) for place in range(count + 1)]
        shares = [starts[first:end] for first, end in pairwise(ends)]
        wait = self._versions.wait
        begun = [one.begin(wait, version, share) for one, share in zip(self._each, shares, strict=True) if share]
        return lambda: [*chain.from_iterable(one.result() for one in begun)]

    def close(self) -> None:
        """End the processes, and what they are at."""
        for place in self._each:
            place.stop()
        for place in self._each:
            place.close()
        self._versions.close()


class _Place:
    """One process after another that samples, and the thread that waits for it."""

    def __init__(self, samplers: Samplers, place: int, setup: SamplerSetup, report: Callable[[str], None]):
        self._samplers, self._place, self._setup, self._report = samplers, place, setup, report
        self._thread, self._worker, self._stopped = ThreadPoolExecutor(1), None, False

    def begin(self, wait: Callable[[], None], version: int, starts: Sequence[Start]) -> Future[list[Episode]]:
        """The episodes by the weights of a version, which are there after `wait`."""
        return self._thread.submit(self._played, wait, version, starts)

    def stop(self) -> None:
        self._stopped = True
        if (worker := self._worker) is not None:
            worker.kill()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._worker is not None:
            self._worker.close()

    def _played(self, wait: Callable[[], None], version: int, starts: Sequence[Start]) -> list[Episode]:
        wait()
        for _ in range(ATTEMPTS):
            try:
                episodes, lines = self._ready().call("play", version, starts, limit=self._samplers.limit)
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
            f"step {version}. Its output is above; Samplers.limit is {self._samplers.limit:g} seconds"
        )

    def _ready(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = Worker(self._setup.sampler, self._samplers.environ(self._place))
            if self._stopped:
                self._worker.kill()
        return self._worker
