"""A model's own multi-token block guesses the token after the next."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from axon.serve.batch import Batch
from axon.serve.multi_token_step import WHOLE, MultiTokenStep
from axon.serve.runner import Runner
from axon.serve.sampler import SampleOutput, on_host
from axon.serve.scheduler import Scheduled
from axon.serve.speculation import Drafts
from axon.serve.step import StepInputs
from axon.serve.stream import Stream


@dataclass(frozen=True)
class MultiToken:
    """What the block predicts that the model was trained with to predict one token further (`axon.nn.MultiTokenBlock`;
    DeepSeek-V3, arXiv:2412.19437, section 2.2): of the last layer's output and the token that was drawn from it the
    guess of the one after, with the same noise, penalties and grammar. It needs no other model, and one block more a
    step."""

    most = 1

    def start(self, target: Runner) -> "MultiTokenDrafts":
        """Raises `UserError` for a model without the block."""
        return MultiTokenDrafts(target)


class MultiTokenDrafts(Drafts):
    """The guesses of `MultiToken`. After each step of the target the block runs over the step's tokens, and its keys
    and values are in pages of its own with the target's numbers: what becomes of those becomes of these.

    The last position of a page that requests share has seen the token that followed for the first of them: a guess
    may be the worse for it, and no token is another one.
    """

    most = MultiToken.most

    def __init__(self, target: Runner):
        self._target, self._programs = target, MultiTokenStep(target.step)
        specs = self._programs.cache_specs(target.pools, target.capacity.cache_dtype)
        self._cache = target.step.empty_cache(specs)
        self._hidden: Array | None = None
        """The last layer's output of the step that was launched last."""
        self._flights: dict[int, deque[tuple[Array, int]]] = defaultdict(deque)
        """Of each request, for each of its steps in flight that draws: the block's outputs, and the first one's row."""
        self._ready: dict[int, tuple[Array, int]] = {}
        """Of each request the row of the block's outputs that follows its last token."""
        target.watch(self)

    @property
    def compiles(self) -> int:
        return self._programs.compiles

    def warm_up(self) -> None:
        """Compile what `Runner.warm_up` does not."""
        step, runtime = self._target.step, self._target.runtime
        where = NamedSharding(step.placement.mesh, WHOLE)
        for rows in {size.rows for size in self._target.capacity.sizes()}:
            zeros = jnp.zeros((rows, runtime.module.dims["embed"]), runtime.compute_dtype, device=where)
            jax.block_until_ready(self._logits_at(zeros, ()))

    # ---- with each step of the target -------------------------------------------------------------------------------

    def logits(self, parameters: Any, variables: Any, cache: Any, last: Array, inputs: StepInputs) -> tuple[Array, Any]:
        """As `Step.logits`."""
        with self._target.step.tracing():
            found = self._programs.forward(parameters, variables, cache=cache, last=last, inputs=inputs)
        logits, cache, self._hidden = found
        return logits, cache

    def drawn(self, parts: Sequence[Scheduled], batch: Batch, drawn: SampleOutput) -> None:
        """Run the block over a step that has just been launched."""
        target, after = self._target, following(parts, batch.inputs.tokens)
        with target.step.tracing():
            rows, self._cache = self._programs.mtp(
                target.parameters,
                target.variables,
                cache=self._cache,
                hidden=self._hidden,
                after=after,
                ids=drawn.ids,
                inputs=batch.inputs,
            )
        row = 0
        for part in parts:
            row += part.rows
            if part.draws:
                self._flights[part.sequence.number].append((rows, row - 1 - len(part.drafts)))

    # ---- guesses ----------------------------------------------------------------------------------------------------

    def verified(self, number: int, accepted: int) -> None:
        rows, first = self._flights[number].popleft()
        self._ready[number] = rows, first + accepted

    def propose(self, wanted: Mapping[int, tuple[Stream, int]]) -> dict[int, list[int]]:
        launched = [(numbers, self._draw(rows, numbers, wanted)) for rows, numbers in self._by_step(wanted)]
        return {
            number: [token]
            for numbers, drawn in launched
            for number, token in zip(numbers, on_host(drawn).ids, strict=False)
        }

    def end(self, number: int) -> None:
        self._flights.pop(number, None)
        self._ready.pop(number, None)

    def _by_step(self, numbers: Mapping[int, Any]) -> list[tuple[Array, list[int]]]:
        """The requests among these of which there is a guess, by the step that it is of, and its outputs."""
        found: dict[int, tuple[Array, list[int]]] = {}
        for number in numbers:
            if number in self._ready:
                rows, _ = self._ready[number]
                found.setdefault(id(rows), (rows, []))[1].append(number)
        return list(found.values())

    def _draw(self, rows: Array, numbers: Sequence[int], wanted: Mapping[int, tuple[Stream, int]]) -> SampleOutput:
        streams = [wanted[number][0] for number in numbers]
        asked = [stream.row_after((), len(stream.sequence.tokens)) for stream in streams]
        return self._target.draw(self._logits_at(rows, [self._ready[number][1] for number in numbers]), asked)

    def _logits_at(self, rows: Array, places: Sequence[int]) -> Array:
        """Logits of some of the rows, the first ones of as many as there are."""
        padded = np.zeros(len(rows), np.int32)
        padded[: len(places)] = places
        with self._target.step.tracing():
            return self._programs.guess(self._target.parameters, self._target.variables, rows, padded)


def following(parts: Sequence[Scheduled], tokens: np.ndarray) -> np.ndarray:
    """Of each token of a step the id after it in its sequence; −1 − row where that is what is drawn of a row: after a
    draft, too, which may be another one.

    `tokens`: of the step, in which those of `parts` follow each other.
    """
    found, end, row = np.roll(tokens, -1), 0, 0
    for part in parts:
        end, row = end + part.count, row + part.rows
        if part.draws:
            count = 1 + len(part.drafts)
            found[end - count : end] = np.arange(count - row - 1, -row - 1, -1)
        else:
            found[end - 1] = part.sequence.tokens[part.start + part.count]
    return found
