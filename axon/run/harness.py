"""A trained model as EleutherAI's lm-eval harness (https://github.com/EleutherAI/lm-evaluation-harness) takes it.

Written for lm-eval 0.4.13. Needs the extra `eval`; nothing imports it but `axon.run.tasks`, which says so.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.runtime import Runtime
from axon.serve.generate import Generator
from axon.serve.request import Sampling
from axon.serve.score import Continuation, Scorer

Report = Callable[[str], None]

GENERATED = 256
"""Tokens that a task generates at most, where it does not say."""

CHUNK = 32
"""Tokens that are generated between two looks for a string that ends the text."""

SAMPLED = {"do_sample", "temperature", "top_k", "top_p", "min_p"}
"""Options of a task's generation that are followed, besides `until` and the number of tokens."""


class HarnessModel(TemplateLM):
    """Log-likelihoods, rolling log-likelihoods and texts of a model with its parameters in place.

    A context that does not fit is cut at its beginning, which `report_cuts` counts. A sequence of the harness is a
    document: it begins as a prompt of `axon generate` does.

    Attributes:
        asked: whether a request has come.

    Args:
        max_length: positions of a sequence, at most.
    """

    def __init__(self, runtime: Runtime, parameters: Any, variables: Any, tokenizer: Tokenizer, max_length: int):
        super().__init__()
        self.max_length, self.cut, self.asked, self._inner = max_length, 0, False, tokenizer
        self._parameters, self._variables = parameters, variables
        self._scorer, self._generator = Scorer(runtime, max_length), Generator(runtime)

    @property
    def eot_token_id(self) -> int:
        """That which opens every document, and so ends the one before it."""
        return self._inner.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a document that begins with `string`; without special tokens, those of the text alone."""
        return self._inner.encode(string) if add_special_tokens is False else self._inner.prompt(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """`((context, continuation), their ids)` → (log-probability in nats, whether greedy decoding takes it)."""
        self.asked = True
        found = [(0.0, True)] * len(requests)  # what an empty continuation has
        places = [place for place, (_, _, tokens) in enumerate(requests) if tokens]
        wanted = [self._continuation(*requests[place][1:]) for place in places]
        for place, score in self._scorer(self._parameters, self._variables, wanted):
            at = places[place]
            found[at] = score.log_likelihood, score.is_greedy
            self.cache_hook.add_partial("loglikelihood", requests[at][0], found[at])
        return found

    def _continuation(self, context: list[int], tokens: list[int]) -> Continuation:
        room = self.max_length + 1 - len(tokens)
        if room < 1:
            raise UserError(
                f"a task has an answer of {len(tokens)} tokens, and sequences have at most {self.max_length} "
                "positions: raise --max-length if the model takes more, or leave the task out"
            )
        self.cut += len(context) > room
        return Continuation(context[-room:], tokens)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability in nats of each text as a document, in windows of `max_length` that do not overlap."""
        self.asked = True
        totals, wanted, owners = [0.0] * len(requests), [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self._inner.encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            wanted += [Continuation(*make_disjoint_window(window)) for window in windows]
            owners += [number] * (len(wanted) - len(owners))
        for place, score in self._scorer(self._parameters, self._variables, wanted, greedy=False):
            totals[owners[place]] += score.log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to the first of the strings `until` or the end of the document.

        A sampled text is drawn by its context and by how many requests before it had the same, as a task's `repeats`
        have: they differ, and the same requests have the same texts.
        """
        self.asked, texts, repeats = True, [], Counter[str]()
        for request in requests:
            context, options = cast(tuple[str, dict[str, Any]], request.args)
            texts.append(self._until(context, dict(options), repeats[context]))
            repeats[context] += 1
            self.cache_hook.add_partial("generate_until", (context, options), texts[-1])
        return texts

    def _until(self, context: str, options: dict[str, Any], repeat: int) -> str:
        """One text: generated in chunks, so that little is generated after its end."""
        sampling, until = sampling_of(options)
        room = self.max_length - sampling.tokens
        if room < 1:
            raise UserError(
                f"a task generates {sampling.tokens} tokens, and sequences have at most {self.max_length} positions: "
                "raise --max-length if the model takes more, or leave the task out"
            )
        prompt, ids, text = self.tok_encode(context), [], ""
        self.cut += len(prompt) > room
        prompt = prompt[-room:]
        while len(ids) < sampling.tokens:
            tokens, seed = min(CHUNK, sampling.tokens - len(ids)), _seed(repeat, len(ids), *prompt)
            chunk = replace(sampling, tokens=tokens, seed=seed)
            ids += self._generator(self._parameters, [*prompt, *ids], chunk, self._variables)
            text = self._inner.continuation(prompt, ids)
            if self._inner.ends.intersection(ids) or any(stop in text for stop in until):
                break
        return text[: min((text.index(stop) for stop in until if stop in text), default=len(text))]

    def report_cuts(self, report: Report) -> None:
        """Say how many contexts were cut."""
        if self.cut:
            report(
                f"{self.cut} contexts had more than the {self.max_length} positions of a sequence, and lost their "
                "beginning; --max-length allows more where the model takes them"
            )


def _seed(*entropy: int) -> int:
    """A seed that follows from all of these, in which no two lists of them are expected to agree."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def sampling_of(options: dict[str, Any]) -> tuple[Sampling, list[str]]:
    """A task's options of generation as `Sampling`, and the strings at which a text ends.

    Raises `UserError` for options that Axon does not follow.
    """
    found: dict[str, Any] = dict(normalize_gen_kwargs(options, GENERATED))
    until, tokens = found.pop("until"), found.pop("max_gen_toks")
    if unknown := sorted(found.keys() - SAMPLED):
        raise UserError(
            f"a task's generation_kwargs has {', '.join(unknown)}: Axon follows until, max_gen_toks and "
            f"{', '.join(sorted(SAMPLED))}. Take it out of the task's file, or leave the task out"
        )
    if not found.pop("do_sample"):
        return Sampling(tokens, temperature=0.0), [stop for stop in until if stop]
    found.setdefault("temperature", 1.0)
    return Sampling(tokens, **found), [stop for stop in until if stop]
