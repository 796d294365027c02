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
from axon.serve.offline import write
from axon.serve.request import Request, Sampling, check_ids
from axon.serve.score import Scorer
from axon.serve.teacher_forcing import Continuation
from axon.serve.text_model import EncoderDecoder, vocab_of

Report = Callable[[str], None]

GENERATED = 256
"""Tokens that a task generates at most, where it does not say."""

SAMPLED = {"do_sample", "temperature", "top_k", "top_p", "min_p"}
"""Options of a task's generation that are followed, besides `until` and the number of tokens."""


def harness_model(
    runtime: Runtime, parameters: Any, variables: Any, tokenizer: Tokenizer, max_length: int
) -> "HarnessModel":
    """The harness's model for a runtime's kind of module."""
    kind = EncoderDecoderHarnessModel if isinstance(runtime.module, EncoderDecoder) else HarnessModel
    return kind(runtime, parameters, variables, tokenizer, max_length)


class HarnessModel(TemplateLM):
    """Log-likelihoods, rolling log-likelihoods and texts of a decoder-only model with its parameters in place.

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
        self._runtime, self._parameters, self._variables = runtime, parameters, variables
        self._scorer = Scorer(runtime, max_length)

    @property
    def eot_token_id(self) -> int:
        """The token that opens every document, and so ends the one before it."""
        return self._inner.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a document that begins with `string`; without special tokens, those of the text alone."""
        ids = self._inner.encode(string) if add_special_tokens is False else self._inner.prompt(string)
        check_ids(ids, vocab_of(self._runtime.module), self._inner, "a task's text")
        return ids

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
        room = self._room(len(tokens) - 1)  # the last one is only predicted
        if room < 1:
            raise UserError(
                f"a task has an answer of {len(tokens)} tokens, and sequences have at most {self.max_length} "
                "positions: raise --max-length if the model takes more, or leave the task out"
            )
        self.cut += len(context) > room
        return Continuation(context[-room:], tokens)

    def _room(self, following: int) -> int:
        """Positions for a context after which so many tokens are read."""
        return self.max_length - following

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability in nats of each text as a document, in windows of `max_length` that do not overlap."""
        self.asked = True
        totals, wanted, owners = [0.0] * len(requests), [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
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
        self.asked, asked, repeats = True, [], Counter[str]()
        for request in requests:
            context, options = cast(tuple[str, dict[str, Any]], request.args)
            asked.append(self._asked(context, dict(options), repeats[context]))
            repeats[context] += 1
        written = write(self._runtime, self._parameters, self._variables, self._inner, asked)
        texts = []
        for request, answer in zip(requests, written, strict=True):
            if answer.error is not None:
                raise UserError(f"a task's text cannot be written: {answer.error}")
            texts.append(answer.text)
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return texts

    def _asked(self, context: str, options: dict[str, Any], repeat: int) -> Request:
        """The request for one text."""
        sampling = sampling_of(options)
        room = self._room(sampling.tokens)
        if room < 1:
            raise UserError(
                f"a task generates {sampling.tokens} tokens, and sequences have at most {self.max_length} positions: "
                "raise --max-length if the model takes more, or leave the task out"
            )
        prompt = self.tok_encode(context)
        self.cut += len(prompt) > room
        prompt = prompt[-room:]
        return Request(tuple(prompt), replace(sampling, seed=_seed(repeat, *prompt)))

    def report_cuts(self, report: Report) -> None:
        """Say how many contexts were cut."""
        if self.cut:
            report(
                f"{self.cut} contexts had more than the {self.max_length} positions of a sequence, and lost their "
                "beginning; --max-length allows more where the model takes them"
            )


class EncoderDecoderHarnessModel(HarnessModel):
    """The same of an encoder–decoder, whose encoder reads the context and whose decoder writes what follows it. Each
    has `max_length` positions, and the special tokens of a prompt are the context's alone."""

    backend = "seq2seq"
    """By which the harness encodes context and continuation apart."""

    def _room(self, following: int) -> int:
        return self.max_length if 1 + following <= self.max_length else 0  # its decoder reads what begins an answer

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: `UserError`."""
        raise UserError(
            "a task asks for the likelihood of whole texts (loglikelihood_rolling), and an encoder–decoder has none: "
            "it predicts the answer to a text, and no token of the text itself. Leave the task out"
        )


def _seed(*entropy: int) -> int:
    """A seed that follows from all of these, in which no two lists of them are expected to agree."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def sampling_of(options: dict[str, Any]) -> Sampling:
    """A task's options of generation. Raises `UserError` for those that Axon does not follow."""
    found: dict[str, Any] = dict(normalize_gen_kwargs(options, GENERATED))
    stop, tokens = tuple(text for text in found.pop("until") if text), found.pop("max_gen_toks")
    if unknown := sorted(found.keys() - SAMPLED):
        raise UserError(
            f"a task's generation_kwargs has {', '.join(unknown)}: Axon follows until, max_gen_toks and "
            f"{', '.join(sorted(SAMPLED))}. Take it out of the task's file, or leave the task out"
        )
    if not found.pop("do_sample"):
        return Sampling(tokens, temperature=0.0, stop=stop)
    found.setdefault("temperature", 1.0)
    return Sampling(tokens, **found, stop=stop)
