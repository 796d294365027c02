"""`Rollouts`, batches of the answers to prompts that the model itself samples, with what rewards say of them."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import numpy as np

from axon.checks import check_range
from axon.data import Data
from axon.data.corpus import check_sources
from axon.data.feed import ALL, FeedContext, SequenceNumbers
from axon.data.feed_config import FedCorpus, FeedConfig
from axon.data.prepared import BatchReader, Question, Rewards
from axon.data.sources import Source
from axon.errors import UserError
from axon.fields import RESUMABLE
from axon.layout import Layout
from axon.model_config import vocab_of
from axon.nn import LanguageModel
from axon.runtime import Runtime
from axon.serve.offline import capacity_for
from axon.serve.policy import check_token_ids
from axon.serve.request import Request, Sampling, check_ids
from axon.train.evaluate import Evaluator
from axon.train.references import References
from axon.tune.chats import Chats
from axon.tune.environments import Environment, check_environment
from axon.tune.episode_runner import EpisodeRunner
from axon.tune.episodes import ENVIRONMENT, Episode
from axon.tune.estimator import Estimator
from axon.tune.judge import Judge
from axon.tune.model_score import ModelScore, ModelScorer
from axon.tune.partial_feed import PartialRolloutFeed
from axon.tune.partial_rollouts import PartialSampler, check_partial
from axon.tune.playing import EnvironmentProcesses, check_portable
from axon.tune.policy_engine import PolicyEngine, check_layout
from axon.tune.policy_sampler import EnginePlayer, Noise, Player, PolicySampler
from axon.tune.prompt import Prompt
from axon.tune.prompts import PromptOrder, of_chats, of_question, of_sources
from axon.tune.replies import ReplyEncoder
from axon.tune.rewards import NeedsMachine, RewardFunction, check_rewards
from axon.tune.rollout_feed import RolloutFeed
from axon.tune.sampler_setup import SamplerSetup
from axon.tune.samplers import SamplerProcesses, Samplers
from axon.tune.scoring import Scoring
from axon.tune.selection import AllAnswers, Selection
from axon.tune.weight_versions import WeightVersions


@dataclass(frozen=True)
class Rollouts(FeedConfig):
    """Answers that the model samples to prompts, and learns from by what rewards say of them.

    Each step draws some prompts, and `samples` answers to each from the weights before the step; a sequence of the
    batch is a prompt with an answer. Weights are 1 where the target is a token of the answer, its end included. What is
    drawn follows from the run's seed, the number of the batch, and the weights.

    Args:
        data: the tokenizer, the shape of a batch, and the held-out data. Of `Chats` the prompts are all of a training
            example before its last answer, which is the right one.
        rewards: name → a function of an `axon.tune.rewards.Sampled`, which must depend on that alone; or a
            `ModelScore`. weights: name → a factor, by default 1, in the sum that is an answer's reward. limit: seconds
            for a reward of an answer; one that takes longer, raises, or gives no finite number is told, and its answer
            is not trained on.
        environment: what speaks between several answers to a prompt, as `Calculator()`: `docs/rollouts.md`. Its own
            reward is called "environment". Tokens that it says are in the sequence and are not learned. `limit` holds
            for each of its calls, too; an episode in which one fails is not trained on. turns: answers in an episode,
            at most. environment_processes: how many processes play its episodes, one each at a time; 0: threads of this
            process do, 128.
        prompts: sources of which each document is a prompt, with `Data`. One that leaves no room for an answer in
            `data.seq` is refused.
        samples: answers to each prompt. redraws: how many times, at most, the prompts of a batch to which all answers
            have the same reward, from which nothing is learned, are replaced by further ones (DAPO's dynamic sampling,
            Yu et al., arXiv:2503.14476, section 3.2). No prompt is twice in a step; what is left is trained on as it
            is.
        selection: which of them are trained on, and as what: `AllAnswers()`, by their rewards, for an objective as
            `GRPO`; `BestAnswers()`, as text; `BestAndWorst()`, as pairs for `DPO`.
        staleness: steps between the weights that sample a batch and those that train on it. Above 0 `samplers` sample
            and rewards are asked while the steps before run, where rewards decide on no redraw and the objective needs
            nothing else of the weights that sample, as `PPO` its values.
        partial: tokens of an answer, or of an episode, that a step samples, at most, where `staleness` is above 0: a
            longer one continues in the next step, by its weights (partial rollouts, Kimi Team, arXiv:2501.12599,
            section 2.6.2), and in the step that trains on it to its end. 0: each is sampled at once.
        sampling: how they are drawn. layout: where each axis lives meanwhile; None: as in training. samplers: processes
            that sample in place of this one, `docs/rollouts.md`.
    """

    data: Data | Chats
    rewards: Mapping[str, RewardFunction | ModelScore] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    limit: float = field(default=10.0, metadata=RESUMABLE)
    environment: Environment | None = None
    turns: int = 8
    environment_processes: int = field(default=0, metadata=RESUMABLE)
    prompts: tuple[Source, ...] = ()
    samples: int = 4
    redraws: int = 0
    selection: Selection = AllAnswers()
    staleness: int = 0
    partial: int = 0
    sampling: Sampling = Sampling(tokens=64, temperature=1.0)
    layout: Layout | None = field(default=None, metadata=RESUMABLE)
    samplers: Samplers | None = field(default=None, metadata=RESUMABLE)

    def __post_init__(self):
        check_range(self, "[1, 2**16]", "samples", "turns")
        check_range(self, "[0, 2**16]", "redraws")
        check_range(self, "[0, 64]", "staleness")
        check_range(self, "[0, 2**31)", "partial")
        check_range(self, "[0, 128]", "environment_processes")
        check_range(self, "(0, 1e6]", "limit")
        self._check_environment()
        self._check_prompts()
        self.selection.check(self.samples)
        known = (*((ENVIRONMENT,) if self.environment else ()), *self.model_scores)
        needed = self.redraws > 0 or self.selection.needs_rewards(self.samples)
        check_rewards(self.functions, self.weights, "Rollouts.rewards", known, needed)
        if self.data.batch % self.of_prompt:
            batch, selection = f"{type(self.data).__name__}.batch", type(self.selection).__name__
            divisible = math.ceil(self.data.batch / self.of_prompt) * self.of_prompt
            raise UserError(
                f"{batch} is {self.data.batch}, and each prompt has {self.of_prompt} sequences, by Rollouts.samples = "
                f"{self.samples} and Rollouts.selection = {selection}(): must divide it. Set {batch} to {divisible}"
            )
        if self.redraws and self.samples == 1:
            raise UserError(
                f"Rollouts.redraws is {self.redraws}, and Rollouts.samples 1: the reward of one answer differs from no "
                "other, so that every prompt would be replaced. Set Rollouts.samples to at least 2, or "
                "Rollouts.redraws to 0"
            )
        if self.samples > 1 and not self.sampling.temperature:
            raise UserError(
                f"Sampling.temperature is 0, and Rollouts.samples {self.samples}: all answers to a prompt would be the "
                "same. Set Rollouts.samples to 1, or Sampling.temperature above 0"
            )

        self._check_partial()

    def _check_partial(self) -> None:
        """Raise `UserError` for partial rollouts beside what needs whole answers."""
        check_partial(self.sampling, self.partial)
        if self.partial and not self.staleness:
            raise UserError(
                f"Rollouts.partial is {self.partial}, and Rollouts.staleness 0: no answer has a further step to "
                "continue in. Set Rollouts.staleness to at least 1, or Rollouts.partial to 0"
            )
        if self.partial and self.redraws:
            raise UserError(
                f"Rollouts.partial is {self.partial}, and Rollouts.redraws {self.redraws}: which prompts are replaced "
                "is known once all of their answers have ended, in the step that trains on them. Set one of the two to "
                "0"
            )

    def _check_environment(self) -> None:
        if self.environment is not None:
            check_environment(self.environment, "Rollouts.environment")
            if self.environment_processes or self.samplers is not None:
                check_portable(self.environment, "Rollouts.environment")
        elif self.environment_processes:
            raise UserError(
                f"Rollouts.environment_processes is {self.environment_processes}, and Rollouts.environment is None: "
                "set the one, or leave out the other"
            )

    def _check_prompts(self) -> None:
        if isinstance(self.data, Data):
            check_sources(self.prompts, "Rollouts.prompts")
        elif self.prompts:
            raise UserError(
                "Rollouts.prompts is set, and the prompts are the questions of Rollouts.data, which are Chats: leave "
                "it out"
            )
        elif self.data.weights is not None:
            raise UserError(
                "Rollouts.data has Chats.weights, and each question is asked as often as any other: leave them out"
            )

    @property
    def of_prompt(self) -> int:
        """Sequences of a batch that each prompt has."""
        return self.selection.sequences(self.samples)

    @property
    def functions(self) -> Mapping[str, RewardFunction]:
        """The rewards that are asked."""
        return {name: one for name, one in self.rewards.items() if not isinstance(one, ModelScore)}

    @property
    def model_scores(self) -> Mapping[str, ModelScore]:
        """The rewards that frozen models give."""
        return {name: one for name, one in self.rewards.items() if isinstance(one, ModelScore)}

    @property
    def references(self) -> frozenset[str]:
        return frozenset(score.reference for score in self.model_scores.values())

    @property
    def positions(self) -> int:
        """Tokens of a prompt with all that follows it, at most."""
        return self.data.seq // self.selection.sides + 1

    @property
    def arrays(self) -> Mapping[str, str]:
        return self.selection.arrays

    def check_runtime(self, runtime: Runtime) -> None:
        if self.layout is not None:
            check_layout(runtime, self.layout, described=self.samplers is not None)

    def prepare(self, report: Callable[[str], None] = print) -> "PreparedRollouts":
        """Prepares the corpus, and reads the prompts. Raises `UserError` for one that leaves no room for an answer."""
        if isinstance(self.data, Chats):
            corpus = self.data.prepare(report)
            prompts = tuple(of_chats(corpus))
        else:
            corpus = self.data.prepare(report)
            prompts = tuple(of_sources(self.prompts, corpus.tokenizer))
        if not prompts:
            names = ", ".join(source.name for source in self.prompts)
            raise UserError(f"Rollouts.prompts: {names} has no documents: give at least one prompt")
        if self.redraws and len(prompts) <= self.batch // self.of_prompt:
            raise UserError(
                f"Rollouts.redraws is {self.redraws}, and there are {len(prompts)} prompts, of which a batch has "
                f"{self.batch // self.of_prompt}: none is left that could replace another. Give more prompts, or set "
                "Rollouts.redraws to 0"
            )
        self._check_room(max(prompts, key=lambda prompt: len(prompt.ids)))
        report(f"prompts: {len(prompts):,}, {self.samples} answers to each; {self.selection} are trained on")
        return PreparedRollouts(self, corpus, prompts)

    def _check_room(self, longest: Prompt) -> None:
        length, tokens, sides = len(longest.ids), self.sampling.tokens, self.selection.sides
        if length + tokens > self.positions:
            field = f"{type(self.data).__name__}.seq"
            shared = field if sides == 1 else f"{field} / {sides}"
            raise UserError(
                f"Rollouts.prompts: {longest.where} has {length} tokens, and an answer has up to Sampling.tokens, "
                f"{tokens}: together more than {shared} + 1, which is {self.positions}. Set {field} to at least "
                f"{sides * (length + tokens - 1)}, or shorten one of the two"
            )


@dataclass(frozen=True)
class PreparedRollouts(FedCorpus):
    """A prepared corpus and the prompts. Returned by `Rollouts.prepare`."""

    config: Rollouts
    prompts: tuple[Prompt, ...]

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        super().check_fits(model, objective, seq)
        module = model.build()
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"Train.data = Rollouts(…) is for an axon.nn.LanguageModel, which continues its prompt; "
                f"{type(model).__name__}.build() gives a {type(module).__name__}: set Train.data to @Data()"
            )
        alone = jax.process_count() == 1 or self.config.samplers is not None
        if self.config.environment is not None and not alone:
            raise UserError(
                f"Rollouts.environment is set, and the run has {jax.process_count()} processes, which would not all "
                "see the same episodes: set Rollouts.samplers = @Samplers(), start it in one process, or leave the "
                "environment out"
            )
        if self.config.samplers is not None:
            self.config.samplers.check(jax.default_backend())
        for reward in self.config.functions.values():
            if isinstance(reward, NeedsMachine):
                reward.check()
        if self.config.partial and objective.asks_before:
            raise UserError(
                f"Rollouts.partial is {self.config.partial}, and {type(objective).__name__} asks the weights that "
                "sampled about whole answers: set Rollouts.partial to 0"
            )
        self.config.selection.check_objective(objective, self.config.samples, self.config.data)
        vocab = vocab_of(model)
        assert vocab is not None, "the corpus fits"
        check_token_ids(self.config.sampling, vocab)
        for prompt in self.prompts:
            check_ids(prompt.ids, vocab, self.tokenizer, f"Rollouts.prompts: {prompt.where}")

    def feed(self, context: FeedContext) -> RolloutFeed:
        config, runtime, shape = self.config, context.runtime, (self.config.batch, self.config.data.seq)
        sampling = replace(config.sampling, logprobs=0) if config.selection.logprobs else config.sampling
        scoring, noise = self._scoring(context.references, context.report), Noise(sampling, context.seed)
        player = self._player(context)
        sampler = PolicySampler(player, scoring, noise, config.samples)
        estimator = Estimator(Evaluator(runtime, context.objective, *shape, context.references))
        parts = self.order(context.seed), sampler, config.selection, estimator
        if not config.partial:
            return RolloutFeed(context, *parts, config.redraws, config.staleness)
        partly = PartialSampler(player, noise, config.samples, config.partial)
        return PartialRolloutFeed(context, *parts, config.staleness, partly)

    def _player(self, context: FeedContext) -> Player:
        """What samples: an engine of this process, or the processes of `Rollouts.samplers`."""
        config, runtime, runner = self.config, context.runtime, self.runner(context.report)
        ids = max((prompt.ids for prompt in self.prompts), key=len)
        request = Request(ids, config.sampling) if runner is None else runner.longest(ids)
        most = [request] * (config.batch // config.of_prompt * config.samples)
        by = config.layout, self.tokenizer, capacity_for(runtime.module, most)
        if config.samplers is None:
            return EnginePlayer(PolicyEngine(runtime, *by), runner)
        folder = Path(mkdtemp()) if context.folder is None else (context.folder / "weights").resolve()
        versions = WeightVersions(folder, runtime, config.staleness + 2)
        setup = SamplerSetup.of(folder, runtime, *by, runner)
        in_a_row = 1 if config.partial else config.samples
        return SamplerProcesses(config.samplers, setup, versions, in_a_row, context.report)

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> BatchReader:
        return self.config.selection.held_out(super().held_out(batches, sequences))

    def rewards(self, references: References, report: Callable[[str], None] = print) -> Rewards:
        scoring = self._scoring(references, report)

        def said(questions: Sequence[Question], episodes: Sequence[Episode]) -> Mapping[str, np.ndarray]:
            return scoring([of_question(question, self.tokenizer) for question in questions], episodes).named

        return said

    def _scoring(self, references: References, report: Callable[[str], None]) -> Scoring:
        config, shape = self.config, (self.config.batch, self.config.data.seq)
        judge = Judge(config.functions, config.weights, config.limit, report)
        models = {name: ModelScorer(score, references, *shape) for name, score in config.model_scores.items()}
        return Scoring(judge, models, config.environment is not None)

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        ids = hashlib.blake2b(repr([prompt.ids for prompt in self.prompts]).encode(), digest_size=8)
        return identity | {"digests": [*identity["digests"], ids.hexdigest()]}

    def runner(self, report: Callable[[str], None] = print) -> EpisodeRunner | None:
        config = self.config
        if config.environment is None:
            return None
        role = None if isinstance(config.data, Data) else config.environment.role
        encode = ReplyEncoder(self.tokenizer, role, self.companions)
        limits = config.turns, config.positions, config.limit
        count = config.environment_processes
        processes = EnvironmentProcesses(config.environment, count, config.limit) if count else None
        return EpisodeRunner(config.environment, config.sampling, encode, *limits, report, processes)

    def order(self, seed: int) -> PromptOrder:
        """Which prompts each batch is of."""
        return PromptOrder(self.prompts, self.config.batch // self.config.of_prompt, seed)

    def drawn(self, seed: int, step: int) -> list[Prompt]:
        """The prompts of batch `step`."""
        return self.order(seed).batch(step)

    def position(self, seed: int, step: int) -> str:
        names = ", ".join(prompt.where for prompt in self.drawn(seed, step)[:16])
        return f"batch {step} of seed {seed}: answers to {names}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        return [{"prompt": prompt.where} for prompt in self.drawn(seed, step)]
