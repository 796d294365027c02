"""`Rollouts`, batches of the answers to prompts that the model itself writes and a function likes best."""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from axon.checks import check_range
from axon.data.batches import shuffled_order
from axon.data.corpus import check_sources
from axon.data.feed import Batch, Feed, FeedContext
from axon.data.feed_config import FedCorpus, FeedConfig
from axon.data.sources import Source
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.fields import RESUMABLE
from axon.layout import Layout
from axon.model_config import vocab_of
from axon.nn import LanguageModel
from axon.own_code import written_at
from axon.serve.offline import Answer, capacity_for
from axon.serve.request import Request, Sampling, check_ids
from axon.train.state import State
from axon.tune import packing
from axon.tune.policy_engine import PolicyEngine

Keep = Callable[[str, str], bool | float]
"""Of a prompt and an answer, whether to train on it, or how good it is: the best are trained on."""


@dataclass(frozen=True)
class Rollouts(FeedConfig):
    """Answers that the model writes to prompts, of which it is trained on the best: expert iteration (Anthony et al.,
    arXiv:1705.08439), as rejection-sampling fine-tuning (ReST, arXiv:2308.08998) in every step.

    Each step draws `batch / kept` prompts, and each prompt's answers from the weights before the step. A sequence of
    the batch is a prompt with an answer; weights are 1 where the target is a token of the answer, its end included.
    What is drawn follows from the run's seed, the number of the batch, and the weights.

    Args:
        data: the tokenizer, the shape of a batch, and the held-out text. prompts: sources of which each document is a
            prompt; a longer one than `data.seq` leaves room for is refused.
        keep: `keep(prompt, answer)`: True or False, or a number, the higher the better. It must depend on these alone.
        samples: answers to each prompt. kept: how many of them are trained on, at most.
        sampling: how they are drawn. layout: where each axis lives meanwhile; None: as in training.
    """

    prompts: tuple[Source, ...]
    keep: Keep
    samples: int = 4
    kept: int = 1
    sampling: Sampling = Sampling(tokens=64, temperature=1.0)
    layout: Layout | None = field(default=None, metadata=RESUMABLE)

    def __post_init__(self):
        check_range(self, "[1, 2**16]", "samples", "kept")
        check_sources(self.prompts, "Rollouts.prompts")
        _check_keep(self.keep)
        if self.kept > self.samples:
            raise UserError(
                f"Rollouts.kept is {self.kept}, and Rollouts.samples {self.samples}: no more can be kept than there "
                f"are. Set Rollouts.samples to at least {self.kept}"
            )
        if self.data.batch % self.kept:
            raise UserError(
                f"Data.batch is {self.data.batch}, and Rollouts.kept {self.kept}: must divide it, as each prompt has "
                f"so many sequences. Set Data.batch to {math.ceil(self.data.batch / self.kept) * self.kept}"
            )
        if self.samples > 1 and not self.sampling.temperature:
            raise UserError(
                f"Sampling.temperature is 0, and Rollouts.samples {self.samples}: all answers to a prompt would be the "
                "same. Set Rollouts.samples to 1, or Sampling.temperature above 0"
            )

    def prepare(self, report: Callable[[str], None] = print) -> "PreparedRollouts":
        """Prepares the corpus, and reads the prompts. Raises `UserError` for one that leaves no room for an answer."""
        corpus = self.data.prepare(report)
        found = [
            Prompt.of(source, number, text, corpus.tokenizer)
            for source in self.prompts
            for number, text in enumerate(source.texts())
        ]
        if not found:
            names = ", ".join(source.name for source in self.prompts)
            raise UserError(f"Rollouts.prompts: {names} has no documents: give at least one prompt")
        self._check_room(max(found, key=lambda prompt: len(prompt.ids)))
        report(f"prompts: {len(found):,}, {self.samples} answers to each, of which {self.kept} at most are trained on")
        return PreparedRollouts(self, corpus, tuple(found))

    def _check_room(self, longest: "Prompt") -> None:
        length, tokens, seq = len(longest.ids), self.sampling.tokens, self.data.seq
        if length + tokens > seq + 1:
            raise UserError(
                f"Rollouts.prompts: {longest.name} has {length} tokens, and an answer has up to Sampling.tokens, "
                f"{tokens}: together more than Data.seq + 1, which is {seq + 1}. Set Data.seq to at least "
                f"{length + tokens - 1}, or shorten one of the two"
            )


@dataclass(frozen=True)
class Prompt:
    """A prompt: its source, its number there, its text and tokens."""

    source: str
    number: int
    text: str
    ids: tuple[int, ...]

    @classmethod
    def of(cls, source: Source, number: int, text: str, tokenizer: Tokenizer) -> "Prompt":
        """The document of that number."""
        return cls(source.name, number, text, tuple(tokenizer.prompt(text)))

    @property
    def name(self) -> str:
        """For messages."""
        return f"document {self.number} of {self.source}"


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
        vocab = vocab_of(model)
        assert vocab is not None, "the corpus fits"
        for prompt in self.prompts:
            check_ids(prompt.ids, vocab, self.tokenizer, f"Rollouts.prompts: {prompt.name}")

    def feed(self, context: FeedContext) -> "RolloutFeed":
        return RolloutFeed(self, context)

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        ids = hashlib.blake2b(repr([prompt.ids for prompt in self.prompts]).encode(), digest_size=8)
        return identity | {"digests": [*identity["digests"], ids.hexdigest()]}

    def drawn(self, seed: int, step: int) -> list[Prompt]:
        """The prompts of batch `step`."""
        order = shuffled_order(len(self.prompts), self.config.batch // self.config.kept, seed)
        return [self.prompts[number] for number in np.asarray(order[step])]

    def position(self, seed: int, step: int) -> str:
        names = ", ".join(prompt.name for prompt in self.drawn(seed, step)[:16])
        return f"batch {step} of seed {seed}: answers to {names}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        return [{"source": prompt.source, "prompt": prompt.number} for prompt in self.drawn(seed, step)]


class RolloutFeed(Feed):
    """Batches of the answers that a run's model gives as it is."""

    sees_state = True

    def __init__(self, prepared: PreparedRollouts, context: FeedContext):
        config = prepared.config
        self._prepared, self._context, self._config = prepared, context, config
        self._numbers, self._metrics = context.numbers(), {}
        groups, longest = config.batch // config.kept, max(prepared.prompts, key=lambda prompt: len(prompt.ids))
        most = [Request(longest.ids, config.sampling)] * (groups * config.samples)
        capacity = capacity_for(context.runtime.module, most)
        self._engine = PolicyEngine(context.runtime, config.layout, prepared.tokenizer, capacity)

    @property
    def metrics(self) -> Mapping[str, float]:
        """`rollout_score`: the mean of what `keep` gave; `rollout_kept`: the share of the batch's sequences that are
        trained on; `rollout_tokens`: the mean of an answer's."""
        return self._metrics

    def draw(self, state: State) -> Batch:
        number = next(self._numbers)
        prompts, samples = self._prepared.drawn(self._context.seed, number), self._config.samples
        requests = [
            Request(prompt.ids, sampling)
            for row, prompt in enumerate(prompts)
            for sampling in self._samplings(number, row)
        ]
        written = self._engine.answers(state, requests)
        groups = [
            [Scored.of(self._config.keep, prompt, answer) for answer in written[row * samples : (row + 1) * samples]]
            for row, prompt in enumerate(prompts)
        ]
        kept = [best for group in groups for best in best_of(group, self._config.kept)]
        self._metrics = _metrics(groups, kept)
        batch = batch_of(kept, self._config.data.seq)
        return {name: value[self._context.sequences] for name, value in batch.items()}

    def _samplings(self, number: int, row: int) -> list[Sampling]:
        """How each answer to the prompt in `row` of batch `number` is drawn: no two have the same noise."""
        key = np.random.SeedSequence((self._context.seed, self._config.sampling.seed), spawn_key=(number, row))
        first = replace(self._config.sampling, seed=int(key.generate_state(1, np.uint64)[0]))
        return [first.of_choice(choice) for choice in range(self._config.samples)]

    def close(self) -> None:
        """Gives the engine's pages back."""
        self._engine.close()


@dataclass(frozen=True)
class Scored:
    """An answer to a prompt, and what `keep` said of it; `is_kept`: whether it may be trained on."""

    prompt: Prompt
    answer: Answer
    score: float
    is_kept: bool

    @classmethod
    def of(cls, keep: Keep, prompt: Prompt, answer: Answer) -> "Scored":
        """Raises `UserError` where `keep` gives neither a bool nor a finite number."""
        said = keep(prompt.text, answer.text)
        if not isinstance(said, bool | int | float | np.bool_ | np.number) or not math.isfinite(said):
            raise UserError(
                f"Rollouts.keep ({written_at(keep)}) gives {said!r} for the answer {answer.text!r} to {prompt.name}: "
                "must be True, False or a finite number"
            )
        return cls(prompt, answer, float(said), bool(said) or not isinstance(said, bool | np.bool_))

    @property
    def example(self) -> packing.Example:
        """The prompt with its answer, which is learned."""
        ids = np.array([*self.prompt.ids, *self.answer.ids], np.int32)
        document = packing.Document(ids, np.arange(len(ids)) >= len(self.prompt.ids))
        return packing.Example((document,), self.prompt.name)


def best_of(group: Sequence[Scored], count: int) -> list[Scored | None]:
    """The `count` best that may be kept, the earlier of equals first; None in the places of those that are missing."""
    ranked = sorted((one for one in group if one.is_kept), key=lambda one: -one.score)[:count]
    return [*ranked, *[None] * (count - len(ranked))]


def batch_of(kept: Sequence[Scored | None], seq: int) -> Batch:
    """A batch `batch seq` of prompts with their answers, weights 1 where the target is of the answer; None: padding."""
    return packing.batch_of([[] if one is None else [one.example] for one in kept], seq, "documents")


def _metrics(groups: Sequence[Sequence[Scored]], kept: Sequence[Scored | None]) -> dict[str, float]:
    scored = [one for group in groups for one in group]
    return {
        "rollout_score": float(np.mean([one.score for one in scored])),
        "rollout_kept": float(np.mean([one is not None for one in kept])),
        "rollout_tokens": float(np.mean([len(one.answer.ids) for one in scored])),
    }


def _check_keep(keep: Keep) -> None:
    """Raise `UserError` unless it can be called with a prompt and an answer."""
    try:
        inspect.signature(keep).bind("prompt", "answer")
    except TypeError as error:
        raise UserError(
            f"Rollouts.keep ({written_at(keep)}) cannot be called with a prompt and an answer, {error}: must be a "
            "function keep(prompt, answer)"
        ) from None
