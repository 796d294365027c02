"""`Rollouts`, batches of the answers to prompts that the model itself samples, with what rewards say of them."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import numpy as np

from axon.checks import check_range
from axon.data import Data
from axon.data.batches import shuffled_order
from axon.data.corpus import TEXT_ARRAYS, check_sources
from axon.data.feed import ALL, Batch, Feed, FeedContext, SequenceNumbers
from axon.data.feed_config import FedCorpus, FeedConfig
from axon.data.prepared import BatchReader, Question
from axon.data.sources import Source
from axon.errors import UserError
from axon.fields import RESUMABLE
from axon.layout import Layout
from axon.model_config import vocab_of
from axon.nn import LanguageModel
from axon.serve.offline import Answer, capacity_for
from axon.serve.request import Finish, Request, Sampling, check_ids
from axon.train.policy_gradient import SAMPLED, PolicyGradient
from axon.train.state import State
from axon.tune import packing
from axon.tune.chats import Chats
from axon.tune.policy_engine import PolicyEngine
from axon.tune.prompts import Prompt, of_chats, of_question, of_sources
from axon.tune.rewards import Judge, RewardFunction, Sampled, Scores, check_rewards


@dataclass(frozen=True)
class Rollouts(FeedConfig):
    """Answers that the model samples to prompts, and learns from by what rewards say of them.

    Each step draws some prompts, and `samples` answers to each from the weights before the step; a sequence of the
    batch is a prompt with an answer. Weights are 1 where the target is a token of the answer, its end included. What is
    drawn follows from the run's seed, the number of the batch, and the weights.

    All answers are trained on, for a `PolicyGradient` as `GRPO`: beside text a batch has `logprobs`, by which each
    token was sampled, and `advantages`. With `kept` it is of text alone, the best answers to each prompt: expert
    iteration (Anthony et al., arXiv:1705.08439), as rejection-sampling fine-tuning (ReST, arXiv:2308.08998) in every
    step.

    Args:
        data: the tokenizer, the shape of a batch, and the held-out data. Of `Chats` the prompts are all of a training
            example before its last answer, which is the right one.
        rewards: name → a function of an `axon.tune.rewards.Sampled`, which must depend on that alone. weights: name → a
            factor, by default 1, in the sum that is an answer's reward. limit: seconds for a reward of an answer; one
            that takes longer, raises, or gives no finite number is told, and its answer is not trained on.
        prompts: sources of which each document is a prompt, with `Data`. One that leaves no room for an answer in
            `data.seq` is refused.
        samples: answers to each prompt. redraws: how many times, at most, the prompts of a batch to which all answers
            have the same reward, from which nothing is learned, are replaced by further ones (DAPO's dynamic sampling,
            Yu et al., arXiv:2503.14476, section 3.2). No prompt is twice in a step; what is left is trained on as it
            is.
        kept: how many of them are trained on, at most; None: all, by their rewards.
        above: with `kept`, only answers whose reward is larger than this are trained on.
        sampling: how they are drawn. layout: where each axis lives meanwhile; None: as in training.
    """

    data: Data | Chats
    rewards: Mapping[str, RewardFunction]
    weights: Mapping[str, float] = field(default_factory=dict)
    limit: float = field(default=10.0, metadata=RESUMABLE)
    prompts: tuple[Source, ...] = ()
    samples: int = 4
    redraws: int = 0
    kept: int | None = None
    above: float = -math.inf
    sampling: Sampling = Sampling(tokens=64, temperature=1.0)
    layout: Layout | None = field(default=None, metadata=RESUMABLE)

    def __post_init__(self):
        check_range(self, "[1, 2**16]", "samples", "kept")
        check_range(self, "[0, 2**16]", "redraws")
        check_range(self, "(0, 1e6]", "limit")
        check_rewards(self.rewards, self.weights, "Rollouts.rewards")
        self._check_prompts()
        if self.kept is not None and self.kept > self.samples:
            raise UserError(
                f"Rollouts.kept is {self.kept}, and Rollouts.samples {self.samples}: no more can be kept than there "
                f"are. Set Rollouts.samples to at least {self.kept}"
            )
        if self.data.batch % self.of_prompt:
            name, batch = ("samples" if self.kept is None else "kept"), f"{type(self.data).__name__}.batch"
            divisible = math.ceil(self.data.batch / self.of_prompt) * self.of_prompt
            raise UserError(
                f"{batch} is {self.data.batch}, and Rollouts.{name} {self.of_prompt}: must divide it, as each prompt "
                f"has so many sequences. Set {batch} to {divisible}"
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

    def _check_prompts(self) -> None:
        if isinstance(self.data, Data):
            check_sources(self.prompts, "Rollouts.prompts")
        elif self.prompts:
            raise UserError(
                "Rollouts.prompts is set, and the prompts are the questions of Rollouts.data, which are Chats: leave "
                "it out"
            )

    @property
    def of_prompt(self) -> int:
        """Sequences of a batch that each prompt has."""
        return self.samples if self.kept is None else self.kept

    def judge(self, report: Callable[[str], None]) -> Judge:
        """What asks the rewards."""
        return Judge(self.rewards, self.weights, self.limit, report)

    @property
    def arrays(self) -> Mapping[str, str]:
        return TEXT_ARRAYS if self.kept is not None else {**TEXT_ARRAYS, **dict.fromkeys(SAMPLED, "batch seq")}

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
        trained = "all" if self.kept is None else f"{self.kept} at most"
        report(f"prompts: {len(prompts):,}, {self.samples} answers to each, of which {trained} are trained on")
        return PreparedRollouts(self, corpus, prompts)

    def _check_room(self, longest: Prompt) -> None:
        length, tokens, seq = len(longest.ids), self.sampling.tokens, self.data.seq
        if length + tokens > seq + 1:
            field = f"{type(self.data).__name__}.seq"
            raise UserError(
                f"Rollouts.prompts: {longest.where} has {length} tokens, and an answer has up to Sampling.tokens, "
                f"{tokens}: together more than {field} + 1, which is {seq + 1}. Set {field} to at least "
                f"{length + tokens - 1}, or shorten one of the two"
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
        if self.config.kept is None:
            policy_of(objective).check_group(self.config.samples, "Rollouts.samples")
        vocab = vocab_of(model)
        assert vocab is not None, "the corpus fits"
        for prompt in self.prompts:
            check_ids(prompt.ids, vocab, self.tokenizer, f"Rollouts.prompts: {prompt.where}")

    def feed(self, context: FeedContext) -> "RolloutFeed":
        return RolloutFeed(self, context)

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> BatchReader:
        reader = super().held_out(batches, sequences)
        return reader if self.config.kept is not None else _NotSampled(reader)

    def rewards_of(
        self, questions: Sequence[Question], answers: Sequence[Answer], report: Callable[[str], None] = print
    ) -> Mapping[str, np.ndarray]:
        prompts = [of_question(question, self.tokenizer) for question in questions]
        with closing(self.config.judge(report)) as judge:
            scores = judge(_sampled(prompts, answers))
        return {"reward": scores.total} | {f"reward_{name}": one for name, one in scores.each.items()}

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        ids = hashlib.blake2b(repr([prompt.ids for prompt in self.prompts]).encode(), digest_size=8)
        return identity | {"digests": [*identity["digests"], ids.hexdigest()]}

    def drawn(self, seed: int, step: int) -> list[Prompt]:
        """The prompts of batch `step`."""
        return [self.prompts[number] for number in self._numbers(seed, step)]

    def further(self, seed: int, step: int) -> Iterator[Prompt]:
        """The prompts that are not of batch `step`, in an order of its own."""
        others = np.setdiff1d(np.arange(len(self.prompts)), self._numbers(seed, step))
        yield from (self.prompts[number] for number in np.random.default_rng((seed, step)).permutation(others))

    def _numbers(self, seed: int, step: int) -> np.ndarray:
        order = shuffled_order(len(self.prompts), self.config.batch // self.config.of_prompt, seed)
        return np.asarray(order[step])

    def position(self, seed: int, step: int) -> str:
        names = ", ".join(prompt.where for prompt in self.drawn(seed, step)[:16])
        return f"batch {step} of seed {seed}: answers to {names}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        return [{"prompt": prompt.where} for prompt in self.drawn(seed, step)]


def policy_of(objective: Any) -> PolicyGradient:
    """An objective that learns from rewards. Raises `UserError` for another."""
    if not isinstance(objective, PolicyGradient):
        raise UserError(
            f"Train.objective is a {type(objective).__name__}, and Rollouts.kept None, so that all answers are learned "
            "from by their rewards: set Train.objective = @GRPO(), or Rollouts.kept to how many of the best to train on"
        )
    return objective


class _NotSampled(BatchReader):
    """Held-out batches as a policy's objective takes them: nothing in them was sampled."""

    def __init__(self, reader: BatchReader):
        self._reader = reader

    def __next__(self) -> Batch:
        batch = next(self._reader)
        return batch | {name: np.zeros_like(batch["weights"]) for name in SAMPLED}

    def __exit__(self, *exception: Any) -> None:
        self._reader.__exit__(*exception)


class RolloutFeed(Feed):
    """Batches of the answers that a run's model gives as it is."""

    sees_state = True

    def __init__(self, prepared: PreparedRollouts, context: FeedContext):
        config = prepared.config
        self._prepared, self._context, self._config = prepared, context, config
        self._numbers, self._metrics = context.numbers(), {}
        self._sampling = config.sampling if config.kept is not None else replace(config.sampling, logprobs=0)
        groups, longest = config.batch // config.of_prompt, max(prepared.prompts, key=lambda prompt: len(prompt.ids))
        most = [Request(longest.ids, config.sampling)] * (groups * config.samples)
        capacity = capacity_for(context.runtime.module, most)
        self._engine = PolicyEngine(context.runtime, config.layout, prepared.tokenizer, capacity)
        self._judge = config.judge(context.report)

    @property
    def metrics(self) -> Mapping[str, float]:
        """`reward` and `reward_std`: mean and standard deviation of the answers'; `reward_NAME` and `reward_NAME_std`:
        of each reward; `reward_failed`: of how many answers one failed; `rollout_uniform`: the share of prompts of
        which no two answers differ in their reward; `rollout_dropped`: of those that were replaced; `rollout_tokens`:
        the mean of an answer's; all of these are of all that was drawn. `rollout_trained`: the share of the batch's
        sequences that are trained on."""
        return self._metrics

    def draw(self, state: State) -> Batch:
        rollout, groups = self._drawn(state, next(self._numbers))
        rows = self._kept(rollout, groups) if self._config.kept is not None else self._all(rollout, groups)
        self._metrics = rollout.metrics | {
            "rollout_dropped": 1 - len(groups) / len(rollout.prompts),
            "rollout_trained": float(np.mean([row is not None for row in rows])),
        }
        examples = [[] if row is None else [rollout.example(row)] for row in rows]
        batch = packing.batch_of(examples, self._config.data.seq, "documents")
        if self._config.kept is None:
            advantages = policy_of(self._context.objective).advantages(rollout.rewards[groups]).ravel()
            batch |= _of_answers(batch["weights"], rows, rollout.answers, advantages)
        return {name: value[self._context.sequences] for name, value in batch.items()}

    def _drawn(self, state: State, number: int) -> tuple["Rollout", np.ndarray]:
        """All that is drawn for batch `number`, and which of its prompts the batch is of."""
        prompts = self._prepared.drawn(self._context.seed, number)
        further = self._prepared.further(self._context.seed, number)
        rollout, groups = self._answered(state, number, prompts), np.arange(len(prompts))
        for _ in range(self._config.redraws):
            uniform = np.flatnonzero(_agreed(rollout.uniform)[groups])
            more = list(islice(further, len(uniform)))
            if not more:
                break
            groups[uniform[: len(more)]] = len(rollout.prompts) + np.arange(len(more))
            rollout += self._answered(state, number, more, len(rollout.prompts))
        return rollout, groups

    def _answered(self, state: State, number: int, prompts: Sequence[Prompt], first: int = 0) -> "Rollout":
        """Answers to prompts of batch `number`, for which `first` were drawn before."""
        requests = [
            Request(prompt.ids, sampling)
            for row, prompt in enumerate(prompts, first)
            for sampling in self._samplings(number, row)
        ]
        answers = self._engine.answers(state, requests)
        return Rollout(prompts, answers, self._judge(_sampled(prompts, answers)))

    def _all(self, rollout: "Rollout", groups: np.ndarray) -> list[int | None]:
        """The answers that have a reward, None in the places of others."""
        rows = np.arange(rollout.rewards.size).reshape(rollout.rewards.shape)[groups].ravel()
        return [None if math.isnan(rollout.rewards.flat[row]) else int(row) for row in rows]

    def _kept(self, rollout: "Rollout", groups: np.ndarray) -> list[int | None]:
        """The best answers to each prompt."""
        assert self._config.kept is not None
        samples = self._config.samples
        return [
            None if best is None else int(group) * samples + best
            for group in groups
            for best in best_of(rollout.rewards[group], self._config.kept, self._config.above)
        ]

    def _samplings(self, number: int, row: int) -> list[Sampling]:
        """How each answer to the prompt in `row` of batch `number` is drawn: no two have the same noise."""
        key = np.random.SeedSequence((self._context.seed, self._sampling.seed), spawn_key=(number, row))
        first = replace(self._sampling, seed=int(key.generate_state(1, np.uint64)[0]))
        return [first.of_choice(choice) for choice in range(self._config.samples)]

    def close(self) -> None:
        """Gives the engine's pages and the rewards' thread back."""
        self._engine.close()
        self._judge.close()


@dataclass(frozen=True)
class Rollout:
    """Prompts, so many answers to each in a row, and what rewards say of all."""

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    scores: Scores

    @cached_property
    def rewards(self) -> np.ndarray:
        """That of each answer, `prompts samples`; NaN where one failed."""
        return self.scores.total.reshape(len(self.prompts), -1)

    @cached_property
    def uniform(self) -> np.ndarray:
        """A mask `prompts`, of those to which no two answers differ in their reward."""
        real = ~np.isnan(self.rewards)
        highest = np.max(self.rewards, axis=1, where=real, initial=-np.inf)
        return highest <= np.min(self.rewards, axis=1, where=real, initial=np.inf)

    def __add__(self, other: "Rollout") -> "Rollout":
        scores = self.scores + other.scores
        return Rollout([*self.prompts, *other.prompts], [*self.answers, *other.answers], scores)

    def example(self, row: int) -> packing.Example:
        """The prompt with the answer `row`, which is learned."""
        prompt = self.prompts[row // self.rewards.shape[1]]
        ids = np.array([*prompt.ids, *self.answers[row].ids], np.int32)
        document = packing.Document(ids, np.arange(len(ids)) >= len(prompt.ids))
        return packing.Example((document,), prompt.where)

    @property
    def metrics(self) -> dict[str, float]:
        """See `RolloutFeed.metrics`."""
        named = {"reward": self.scores.total} | {f"reward_{name}": one for name, one in self.scores.each.items()}
        real = {name: values[~np.isnan(values)] for name, values in named.items()}
        means = {name: float(np.mean(values)) for name, values in real.items() if len(values)}
        spreads = {f"{name}_std": float(np.std(values)) for name, values in real.items() if len(values)}
        return {
            **means,
            **spreads,
            "reward_failed": float(np.sum(np.isnan(self.scores.total))),
            "rollout_uniform": float(np.mean(self.uniform)),
            "rollout_tokens": float(np.mean([len(answer.ids) for answer in self.answers])),
        }


def best_of(rewards: np.ndarray, count: int, above: float) -> Iterator[int | None]:
    """The places of the `count` best of some answers' rewards `samples` that are larger than `above`, the earlier of
    equals first; None in the places of those that are missing."""
    ranked = sorted(np.flatnonzero(rewards > above).tolist(), key=lambda place: -rewards[place])[:count]
    yield from (*ranked, *[None] * (count - len(ranked)))


def _sampled(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Sampled]:
    """The answers as rewards are given them."""
    samples = len(answers) // len(prompts)
    pairs = zip([prompt for prompt in prompts for _ in range(samples)], answers, strict=True)
    return [
        Sampled(
            prompt.text,
            answer.text,
            answer.ids,
            answer.finish is Finish.STOP,
            prompt.reference,
            prompt.record,
            prompt.where,
        )
        for prompt, answer in pairs
    ]


def _of_answers(
    weights: np.ndarray, rows: Sequence[int | None], answers: Sequence[Answer], advantages: np.ndarray
) -> Batch:
    """The arrays `SAMPLED` of a batch: where its `weights`, `batch seq`, are 1, and 0 elsewhere. `advantages`, `batch`,
    are of its sequences, whose answers are `rows` of all `answers`."""
    batch = {name: np.zeros_like(weights) for name in SAMPLED}
    for place, row in enumerate(rows):
        if row is not None:
            own = place, weights[place] > 0
            batch["logprobs"][own] = [one.logprob for one in answers[row].logprobs]
            batch["advantages"][own] = advantages[place]
    return batch


def _agreed(decided: np.ndarray) -> np.ndarray:
    """The first process's decisions, for all processes: a reward may take too long in one of them alone."""
    if jax.process_count() == 1:
        return decided
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return np.asarray(broadcast_one_to_all(decided.astype(np.int32)), bool)
