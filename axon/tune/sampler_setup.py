"""`SamplerSetup`, what a process needs to sample as a run does, and the `Sampler` that it makes there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from axon.axes import Execution
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.launch.worker import portable
from axon.layout import Layout, first_devices, validate_program
from axon.nn.weight_transform import WeightTransform
from axon.precision import Precision
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.tune.episode_runner import EpisodeRunner
from axon.tune.episodes import Episode
from axon.tune.policy_engine import PolicyEngine
from axon.tune.policy_sampler import played
from axon.tune.starts import Start
from axon.tune.weight_versions import WeightReader


@dataclass(frozen=True)
class SamplerSetup:
    """What a process samples by. It can be pickled.

    Args:
        weights: the folder of `WeightVersions`.
        model, layout, precision, execution, transforms: see `Runtime`. tokenizer, capacity: see `Engine`.
        runner: plays episodes of an environment; None: an answer is all.
    """

    weights: Path
    model: Any
    layout: Layout
    precision: Precision
    execution: Execution
    transforms: Sequence[WeightTransform]
    tokenizer: Tokenizer
    capacity: Capacity
    runner: EpisodeRunner | None

    @classmethod
    def of(
        cls,
        weights: Path,
        trained: Runtime,
        layout: Layout | None,
        tokenizer: Tokenizer,
        capacity: Capacity,
        runner: EpisodeRunner | None,
    ) -> "SamplerSetup":
        """Of the model that is trained; `layout`: where each axis lives, None: as it is trained."""
        layout = layout.with_axes_of(trained.layout) if layout is not None else trained.layout
        parts = trained.model, layout, trained.precision, trained.execution.on_devices, trained.transforms
        return cls(weights, *parts, tokenizer, capacity, runner and replace(runner, report=say))

    def sampler(self) -> "Sampler":
        """Made in the process that samples. Raises `UserError` for a layout that its devices do not have."""
        shared = {"precision": self.precision, "execution": self.execution, "transforms": self.transforms}
        devices = first_devices(self.layout)
        try:
            runtime = Runtime(self.model, self.layout, devices=devices, **shared)
            validate_program(runtime.placement, runtime.parameters, [*self.layout.table("activations")], tuple)
        except UserError as error:
            raise UserError(
                f"Rollouts.layout (None: that of training), on the {len(devices)} devices of a process that samples: "
                f"{error}"
            ) from None
        return Sampler(self, runtime)


class Sampler:
    """An engine in a process of its own, by the weights that are asked for."""

    def __init__(self, setup: SamplerSetup, runtime: Runtime):
        self._weights, self._lines = WeightReader(setup.weights, runtime), list[str]()
        self._engine = PolicyEngine(runtime, None, setup.tokenizer, setup.capacity)
        self._runner = setup.runner and replace(setup.runner, report=self._lines.append)

    def play(self, version: int, starts: Sequence[Start]) -> tuple[list[Episode], list[str]]:
        """The episodes by the weights of a version, and what was reported meanwhile. Raises as `played`."""
        self._lines.clear()
        state = self._weights.state(version)
        episodes = played(self._engine, self._runner, state, starts)
        return [replace(one, error=one.error and portable(one.error)) for one in episodes], list(self._lines)


def say(line: str) -> None:
    """Print a line. `print` itself cannot be pickled once Ray has put its own in that place."""
    print(line)
