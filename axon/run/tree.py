"""The tree of a training run: the same object from a config file, from a script and from a notebook."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from axon.checkpoint import Checkpoints
from axon.data import Data
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn import LanguageModel
from axon.observe.trackers import TrackerConfig
from axon.parallel.outer import DiLoCo, SlowMo
from axon.precision import Precision
from axon.run.session import Session
from axon.serve.generate import Sampling
from axon.train.optimizer import AdamW, OneBitAdam
from axon.train.programs import program
from axon.train.step import Program, State


class Model(Protocol):
    """What describes a model: a frozen dataclass with a vocabulary size, which builds the module.

    An `axon.nn.LanguageModel` around a block of one's own gives embedding, loss, generation and the count of FLOPs.
    """

    vocab: int

    def build(self) -> LanguageModel: ...


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text: every `every` steps and at the end, on `batches` batches of it (None: all)."""

    every: int = 200
    batches: int | None = 20

    def __post_init__(self):
        if self.every < 1 or (self.batches is not None and self.batches < 1):
            raise UserError(f"Evaluation: every is {self.every} and batches {self.batches}; write 1 or more")


@dataclass(frozen=True)
class Sample:
    """Text that the trained model continues when the run ends."""

    prompt: str
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Train:
    """A training run.

    Args:
        model: what is trained, as `Llama(…)`. data: what it reads. optimizer: how it learns.
        steps: how many optimizer steps. seed: from which initial values, data order and dropout follow.
        layout: where each named axis lives. precision: dtypes. z_loss: weight of the squared log-partition.
        kernels: implementations asked for by name, as `{'attention': 'xla'}`; others are chosen, and said.
        outer: lets the replicas of a slow link train apart between outer steps, as `DiLoCo(every=50)`; None for none.
        evaluation: loss on held-out text; None for none. checkpoints: when to save and what to keep.
        trackers: where numbers go besides `metrics.jsonl`. sample: text to continue at the end.
        init_from: the folder of a run whose parameters this one starts from.
        run_dir: the run's own folder.
    """

    model: Model
    data: Data
    optimizer: AdamW | OneBitAdam
    steps: int
    seed: int = 0
    layout: Layout = Layout()
    outer: DiLoCo | SlowMo | None = None
    precision: Precision = Precision()
    z_loss: float = 0.0
    kernels: Mapping[str, str] = field(default_factory=dict)
    evaluation: Evaluation | None = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    trackers: tuple[TrackerConfig, ...] = ()
    sample: Sample | None = None
    init_from: str | None = None
    run_dir: str | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise UserError(f"Train.steps is {self.steps}; write 1 or more")
        if self.outer is not None and self.steps % self.outer.every:
            name, every, lost = type(self.outer).__name__, self.outer.every, self.steps % self.outer.every
            raise UserError(
                f"Train.steps is {self.steps}, and {name} has an outer step every {every} steps: the last {lost} would "
                f"not reach the parameters. Set Train.steps to {self.steps - lost + every}"
            )
        if self.data.held_out == 1:
            raise UserError("Train.data: Data.held_out is 1, which leaves no text to train on; write less")
        if self.evaluation is not None and self.data.held_out == 0:
            raise UserError("Train.evaluation needs text: set Data.held_out above 0, or Train.evaluation to None")

    def run(self, *, steps: int | None = None, profile: bool = False, report: Callable[[str], None] = print) -> State:
        """All of it: prepare the data, train or continue, evaluate, sample, save. Returns the last state.

        `steps` stops earlier, without changing the schedule; `profile` records a few steps for XProf; `report` takes
        each line of what is going on. Raises `UserError` for what a person has to change, `Interrupted` after saving.
        """
        return Session(self, report).run(steps, profile)

    @property
    def folder(self) -> Path:
        if self.run_dir is None:
            raise UserError("Train.run_dir is not set: name a folder for this run, as 'runs/first'")
        return Path(self.run_dir)

    # ---- for people who own their loop ----------------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """The compiled functions of this run: see `axon.train.step.Program`."""
        return self.program_on(None)

    def program_on(self, placement: Placement | None) -> Program:
        """The run's program on another mesh than that of the devices there are: to trace it, or to compile for."""
        return program(
            self.model,
            self.layout,
            self.optimizer,
            outer=self.outer,
            batch=self.data.batch,
            seq=self.data.seq,
            precision=self.precision,
            seed=self.seed,
            z_loss=self.z_loss,
            kernels=self.kernels,
            placement=placement,
        )

    def init(self) -> State:
        """The state at step 0."""
        return self.program.init()

    def step(self, state: State, batch: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
        """One step on a batch of NumPy arrays: the next state (the old one's memory is reused) and its metrics."""
        return self.program.step(state, self.program.place(batch))

    def evaluate(self, state: State, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Summed loss in nats and tokens of a batch of NumPy arrays."""
        return self.program.evaluate(state.parameters, self.program.place(batch))
