"""The configuration of a training run: the same object from a .gin file, a script and a notebook."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from flax import nnx

from axon.axes import Execution
from axon.checkpoint import Checkpoints
from axon.checkpoint.remote import working_folder
from axon.checks import check_range
from axon.data import Data, FeedConfig, Images
from axon.disk import check_paths
from axon.errors import UserError
from axon.fields import RESUMABLE, Location
from axon.layout import Layout
from axon.nn.lora import one_adapter
from axon.nn.low_precision import with_recipe
from axon.nn.weight_transform import WeightTransform, adapter_names
from axon.object_store import is_url
from axon.observe.trackers import TrackerConfig
from axon.parallel.outer import DiLoCo, SlowMo
from axon.precision import Precision
from axon.run.init_from import InitFrom
from axon.run.planned import Planned
from axon.serve.request import Sampling
from axon.train.adapters_off import AdaptersOff
from axon.train.faults import Faults
from axon.train.objective import NextToken, Objective
from axon.train.optimizers import OneBitAdam, Optimizer
from axon.tune.examples import Examples


class Model(Protocol):
    """A model's configuration: a frozen dataclass, which builds the module.

    One of text has the size of its vocabulary, `vocab`; one of images how many positions an image has, `seq`.
    An `axon.nn.LanguageModel` around a block of your own has embedding, loss, generation and the count of FLOPs.
    """

    def build(self) -> nnx.Module: ...


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out data: every `every` steps and at the end, on `batches` batches of it (None: all).

    `answers`: so many held-out questions of chats are answered too, greedily by the engine; of adapters that are
    trained at once, each answers so many of its own. `eval_exact` is the share of answers that are the right one, token
    by token, end included, `eval_exact/NAME` that of an adapter's, and `eval_reward`, where a run learns from rewards,
    their mean. With an environment they are episodes, of which the last answer counts. The first are on the page of
    `axon report`. None: none. `at_start`: also before the first step.
    """

    every: int = 200
    batches: int | None = 20
    answers: int | None = None
    at_start: bool = False

    def __post_init__(self):
        check_range(self, "[1, inf)", "every", "batches", "answers")


@dataclass(frozen=True)
class Sample:
    """Text that the trained model continues when the run ends."""

    prompt: str
    sampling: Sampling = Sampling()

    def __post_init__(self):
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"Sample.prompt is {self.prompt!r}; must be valid UTF-8") from None


@dataclass(frozen=True)
class Reference:
    """A frozen model that an objective needs beside the one that is trained, as a teacher.

    It is placed by the run's layout as parameters are, is in no checkpoint, and must not change while the run lasts.

    Args:
        model: its config, as `Llama(…)`. source: its parameters: the folder of a run or its mirror's URL, or
            `hf:DIR_OR_NAME`.
    """

    model: Model
    source: Location

    def __post_init__(self):
        check_paths(self)


@dataclass(frozen=True)
class Train:
    """A training run, as data: `axon.run.run` carries it out, `axon.run.program` compiles its functions.

    Args:
        model: what is trained, as `Llama(…)`. data: what it is trained on: a corpus, images, batches drawn of the
            model as it is, as `Rollouts(…)`, or examples, as `Chats(…)`. optimizer: how parameters are updated.
        steps: how many optimizer steps. seed: from which initial values, data order and dropout follow.
        objective: what is minimised. layout: where each named axis lives. precision: dtypes.
        execution: how it is carried out: remat, kernels, buffers, host and disk tiers, compiler options.
        plan: what these two were planned for (`axon plan --write`), with which the run is compared.
        transforms: what becomes of weights of the model, one after the other, as `(LoRA(rank=16),)`.
        references: name → a frozen model beside it, which the objective names, as `Distillation` its "teacher", or
            the data, as a `ModelScore` of `Rollouts`; `AdaptersOff()` is the one that is trained, without its adapters.
        outer: lets replicas across a slow link train separately between outer steps, as `DiLoCo(every=50)`; or None.
        evaluation: loss on held-out data; None for none. checkpoints: when to save and what to keep.
        faults: what to do at a step that is not finite, or a spike, or hangs.
        trackers: where metrics are logged besides `metrics.jsonl`. sample: text to continue at the end.
        stages: name → a run that is carried out before, in the folder of that name within this one's: `stage:NAME` is
            its last checkpoint, wherever a run is named.
        init_from: the folder of a run or its mirror's URL, or `hf:DIR_OR_NAME`, whose parameters this one starts from;
            or `InitFrom(…)`, which takes some of them, renames or casts them.
        run_dir: the run's own folder; or a URL, `s3://…` or `gs://…`: then it is in Axon's cache, and mirrored there.
    """

    model: Model
    data: Data | Images | FeedConfig | Examples
    optimizer: Optimizer | OneBitAdam
    steps: int = field(metadata=RESUMABLE)
    seed: int = 0
    objective: Objective = NextToken()
    layout: Layout = field(default=Layout(), metadata=RESUMABLE)
    execution: Execution = field(default=Execution(), metadata=RESUMABLE)
    plan: Planned | None = field(default=None, metadata=RESUMABLE)
    transforms: tuple[WeightTransform, ...] = ()
    references: Mapping[str, Reference | AdaptersOff] = field(default_factory=dict)
    outer: DiLoCo | SlowMo | None = None
    precision: Precision = Precision()
    evaluation: Evaluation | None = field(default=Evaluation(), metadata=RESUMABLE)
    checkpoints: Checkpoints = field(default=Checkpoints(), metadata=RESUMABLE)
    faults: Faults = field(default=Faults(), metadata=RESUMABLE)
    trackers: tuple[TrackerConfig, ...] = field(default=(), metadata=RESUMABLE)
    sample: Sample | None = field(default=None, metadata=RESUMABLE)
    stages: "Mapping[str, Train]" = field(default_factory=dict)
    init_from: Location | InitFrom | None = None
    run_dir: Location | None = field(default=None, metadata=RESUMABLE)

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "steps")
        check_range(self, "[0, 2**32)", "seed")
        check_paths(self)
        if self.run_dir is not None and is_url(self.run_dir) and self.checkpoints.mirror is not None:
            raise UserError("Train.run_dir is a URL, and Checkpoints.mirror is set: set one of the two")
        if self.outer is not None and self.steps % self.outer.every:
            name, every, lost = type(self.outer).__name__, self.outer.every, self.steps % self.outer.every
            raise UserError(
                f"Train.steps is {self.steps}, and {name} has an outer step every {every} steps: the last {lost} would "
                f"not reach the parameters. Set Train.steps to {self.steps - lost + every}"
            )
        if self.data.held_out == 1:
            raise UserError("Train.data: Data.held_out is 1, which leaves no text to train on; must be in [0, 1)")
        if self.evaluation is not None and self.data.held_out == 0:
            data = type(self.data.data if isinstance(self.data, FeedConfig) else self.data).__name__
            raise UserError(f"Train.evaluation needs {data}.held_out above 0: set it, or Train.evaluation to None")
        self._check_best()
        examples = self.data.data if isinstance(self.data, FeedConfig) else self.data
        if self.adapters or (isinstance(examples, Examples) and examples.adapters):
            self._check_adapters()
        if self.data.text is None and self.sample is not None:
            raise UserError("Train.sample is text to continue, and Train.data are images: set Train.sample to None")

    def _check_adapters(self) -> None:
        """Raise `UserError` unless the data are of the adapters that are trained, and no text of the model as a
        whole."""
        data, kind = self.data, type(self.data).__name__
        if not isinstance(data, Examples):
            raise UserError(
                f"Train.data is {kind}, and adapters that are trained at once (LoRA.adapters, Chats.adapters) have "
                "examples of their own: set it to @Chats(), or leave adapters out"
            )
        if tuple(dict.fromkeys(data.adapters)) != self.adapters:
            raise UserError(
                f"LoRA.adapters is {self.adapters}, and {kind}.adapters, which says whose each source is, "
                f"{data.adapters}: name the same ones in both, in one order"
            )
        if self.sample is not None:
            raise UserError(
                f"Train.sample is set, which is of one model, and LoRA.adapters make {len(self.adapters)}: leave it "
                f"out, and ask each when the run is done, as axon generate RUN:{self.adapters[0]}"
            )

    def _check_best(self) -> None:
        """Raise `UserError` if no checkpoint but the last is evaluated, of which the best are to be kept."""
        every, evaluation = self.checkpoints.every, self.evaluation
        if self.checkpoints.keep_best is None:
            return
        if evaluation is None:
            raise UserError(
                f"Checkpoints.keep_best is {self.checkpoints.keep_best}, and Train.evaluation is None, so that no "
                "checkpoint has a held-out loss: set Train.evaluation = @Evaluation(), or Checkpoints.keep_best to None"
            )
        if math.lcm(every, evaluation.every) > max(every, self.steps):
            raise UserError(
                f"Checkpoints.keep_best is {self.checkpoints.keep_best}, and no step within Train.steps, {self.steps}, "
                f"is both saved and evaluated: Checkpoints.every is {every}, Evaluation.every {evaluation.every}. Set "
                f"Evaluation.every to {every}"
            )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are trained at once; none where all that is trained is one model."""
        return adapter_names(self.transforms)

    def of_adapter(self, name: str) -> "Train":
        """The run that trains this one of `adapters` alone, by its own sources."""
        assert isinstance(self.data, Examples)
        return replace(self, transforms=one_adapter(self.transforms), data=self.data.of_adapter(name))

    @property
    def reference_models(self) -> dict[str, object]:
        """Name → the config of a frozen model, or `AdaptersOff`."""
        return {name: one.model if isinstance(one, Reference) else one for name, one in self.references.items()}

    @property
    def data_references(self) -> frozenset[str]:
        """Names of the frozen models that the data need."""
        return self.data.references if isinstance(self.data, FeedConfig) else frozenset()

    @property
    def seq(self) -> int:
        """Positions of a sequence: of text as the data cut it, of an image as the model does."""
        return self.data.seq_of(self.model)

    @property
    def weight_transforms(self) -> tuple[WeightTransform, ...]:
        """All that weights of the model go through in training: the recipe's, then `transforms`."""
        return with_recipe(self.precision.recipe, self.transforms)

    @property
    def folder(self) -> Path:
        """The run's folder on this machine: of a URL one in Axon's cache."""
        if self.run_dir is None:
            raise UserError("Train.run_dir is not set: name a folder for this run, as 'runs/first'")
        return working_folder(self.run_dir) if is_url(self.run_dir) else Path(self.run_dir)

    @property
    def mirror(self) -> str | None:
        """Where the checkpoints are copied to, if anywhere."""
        return self.run_dir if self.run_dir is not None and is_url(self.run_dir) else self.checkpoints.mirror
