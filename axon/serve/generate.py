"""Generation: the text that follows a prompt, token by token, with a KV cache."""

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes.patterns import base
from axon.errors import UserError
from axon.kernels.sampling import sample
from axon.layout import Placement
from axon.nn import Head, Rope
from axon.runtime import Runtime
from axon.serve.request import Sampling

PROMPT_STEP = 64
"""Prompts are padded to a multiple of this, so that their lengths share one compiled program."""


@runtime_checkable
class Generative(Protocol):
    """A module that writes text: an `axon.nn.LanguageModel`, or an encoder–decoder, which answers a prompt.

    `max_length`: how many positions prompt and text may have; None for any number. `continues`: whether the text goes
    on from the prompt.
    """

    max_length: int | None
    continues: bool

    @property
    def output(self) -> Head:
        """What makes logits."""
        ...

    def prefill(self, tokens: Array, length: Array, room: int) -> tuple[Array, Any]:
        """See `axon.nn.LanguageModel.prefill`."""
        ...

    def advance(self, ids: Array, state: Any) -> tuple[Array, Any]:
        """See `axon.nn.LanguageModel.advance`."""
        ...


class Generator:
    """Writes what follows prompts, by a runtime's module and mesh, its parameters in place; the one sequence is not
    split.

    A program is compiled for each padded length of a prompt and each `Sampling` but for its seed, and cached.
    """

    def __init__(self, runtime: Runtime):
        """Raises `UserError` for a module that writes no text, as an encoder."""
        check_generates(runtime.module)
        self.runtime = runtime
        self._placement = unsplit(runtime.placement, "batch", "seq")  # one sequence, a token at a time
        # `Train.kernels` chooses the kernels of training; of generation's own there is only sampling.
        self._kernels = {name: kernel for name, kernel in runtime.kernels.items() if name == "sampling"}
        self._compiled = runtime.jit(self._generate, static_argnames="sampling")

    def __call__(self, parameters: Any, prompt: list[int], sampling: Sampling, variables: Any = None) -> list[int]:
        """The ids that follow `prompt` (ids, the beginning-of-document token first)."""
        check_length(self.runtime.module, len(prompt), sampling)
        key = jax.random.key(sampling.seed)
        short = _until_long(self.runtime.module, len(prompt))
        if short is None or short >= sampling.tokens:
            return self._continued(parameters, prompt, sampling, variables, key)
        ids = self._continued(parameters, prompt, replace(sampling, tokens=short), variables, key)
        rest, key = replace(sampling, tokens=sampling.tokens - short), jax.random.fold_in(key, 1)
        return ids + self._continued(parameters, prompt + ids, rest, variables, key)

    def _continued(
        self, parameters: Any, prompt: list[int], sampling: Sampling, variables: Any, key: Array
    ) -> list[int]:
        tokens = np.zeros((1, _padded(self.runtime.module, len(prompt))), np.int32)
        tokens[0, : len(prompt)] = prompt
        rules = replace(sampling, seed=0)
        with self.runtime.tracing(self._placement, self._kernels):
            ids = self._compiled(parameters, variables or {}, tokens, np.int32(len(prompt)), key, sampling=rules)
        return np.asarray(ids).tolist()

    def _generate(
        self, parameters: Any, variables: Any, tokens: Array, length: Array, key: Array, sampling: Sampling
    ) -> Array:
        """`tokens[1, padded]`, the first `length` of them real → `sampling.tokens` new ids."""
        model: Generative = self.runtime.bind(parameters, variables)

        def step(carry, key):
            last, state = carry
            token = next_tokens(model.output.logits(last)[:, 0].astype(jnp.float32), key[None], sampling)
            return model.advance(token[:, None], state), token[0]

        carry = model.prefill(tokens, length, sampling.tokens)
        return lax.scan(step, carry, jax.random.split(key, sampling.tokens))[1]


def check_generates(model: Any) -> None:
    """Raise `UserError` for a module that writes no text, as an encoder."""
    if not isinstance(model, Generative):
        raise UserError(
            f"a {type(model).__name__} cannot write a text: generation needs an axon.nn.LanguageModel, which predicts "
            "the next token, or an encoder–decoder as models.t5.T5 builds one"
        )


def check_length(model: Generative, prompt: int, sampling: Sampling) -> None:
    """Raise `UserError` if a prompt of `prompt` ids and the tokens to generate exceed the positions of `model`."""
    check_generates(model)
    total = prompt + sampling.tokens
    if model.max_length is not None and total > model.max_length:
        raise UserError(
            f"a prompt of {prompt} tokens and {sampling.tokens} more need {total} positions, and this model has "
            f"{model.max_length}: shorten the prompt, or lower Sampling.tokens"
        )


def _padded(model: Generative, length: int) -> int:
    """A prompt's padded length, at most the model's number of positions."""
    padded = -(-length // PROMPT_STEP) * PROMPT_STEP
    return padded if model.max_length is None else min(padded, model.max_length)


def unsplit(placement: Placement, *names: str) -> Placement:
    """Nothing split along the axes `names`, of which `seq` is one, or their roles, as `seq.residual`; and those that
    generation and scores see whole."""
    layout = placement.layout
    whole = {name for name in layout.rows if base(name) in names}
    whole |= {*names, "vocab.whole", "head_dim.whole", "key_latent.whole"}
    return Placement(replace(layout, rows={**layout.rows, **dict.fromkeys(whole)}, context=None), placement.mesh)


def _until_long(model: Any, prompt: int) -> int | None:
    """How many tokens follow a prompt before positions rotate at other frequencies, as LongRoPE's do, those of keys in
    the cache too: what comes then is of a cache made anew. None: they never do."""
    ropes = (getattr(module, "rope", None) for _, module in nnx.iter_modules(model))
    scalings = [rope.scaling for rope in ropes if isinstance(rope, Rope) and rope.scaling is not None]
    changes = [at for scaling in scalings if (at := scaling.changes_at) is not None]
    left = min(changes, default=prompt - 1) - prompt + 1
    return left if left > 0 else None


def next_tokens(logits: Array, keys: Array, sampling: Sampling) -> Array:
    """A sampled id for each request: `logits[batch vocab]`, `keys[batch]` → `batch`."""
    settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    given = [None if value is None else jnp.full(keys.shape, value) for value in settings]
    whole = (PartitionSpec(),) * (2 + len(given))
    return axes.per_device(sample, whole, PartitionSpec())(axes.shard(logits, "batch vocab.whole"), keys, *given)
