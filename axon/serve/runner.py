"""A model over its pages: what a scheduler plans becomes steps on the devices."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from axon.errors import UserError
from axon.layout import Placement
from axon.plan.memory import available, gib
from axon.runtime import Runtime
from axon.serve.adapters import Adapter, Adapters
from axon.serve.batch import Batch, Batches
from axon.serve.capacity import ROOM, Capacity
from axon.serve.encoder_step import EncoderStep
from axon.serve.pages import page_hash
from axon.serve.policy import Row, draws
from axon.serve.request import Request
from axon.serve.sampler import SampleOutput
from axon.serve.scheduler import Scheduled, Scheduler
from axon.serve.sequence import Sequence as Running
from axon.serve.snapshots import Snapshots
from axon.serve.state_copies import StateCopies
from axon.serve.step import Step, StepInputs, changes_at
from axon.serve.text_model import as_decoded, check_writes, vocab_of
from axon.serve.weights import placed

LONG = "long"
"""What keys are called that rotate as those of long sequences do: none of a short one is the same."""


class StepObserver(Protocol):
    """An observer that computes beside each step of a runner."""

    def logits(self, parameters: Any, variables: Any, cache: Any, last: Array, inputs: StepInputs) -> tuple[Array, Any]:
        """As `Step.logits`, in its place."""
        ...

    def drawn(self, parts: Sequence[Scheduled], batch: Batch, drawn: SampleOutput) -> None:
        """A step was launched, with these parts in their order, and drew this."""
        ...


class Runner:
    """One model's pools of pages, its scheduler, and its compiled step.

    Args:
        runtime: of a `TextModel`. parameters, variables: nested by path, in their places.
        capacity: how much at once. drafts: of a sequence in a step, at most: of its states one more is kept.
    """

    def __init__(self, runtime: Runtime, parameters: Any, variables: Any, capacity: Capacity, drafts: int = 0):
        """Raises `UserError` for a module that writes no text."""
        check_writes(runtime.module)
        self.runtime, self.capacity, self.variables = runtime, capacity, variables or {}
        self.parameters, self.adapters = placed(runtime, parameters), Adapters(runtime)
        self.max_length = capacity.length_of(runtime.module)
        self.vocab = vocab_of(runtime.module)
        self._changes_at = changes_at(runtime.module)
        self._step, sizes = Step(runtime, self.max_length), capacity.sizes()
        page_size = capacity.page_size_on(runtime.placement.platform)
        self.pools = capacity.pools(self._step.windows, page_size, self.max_length)
        budget, rows = sizes[-1].tokens, sizes[-1].rows
        kept = self._step.snapshot_specs(capacity.num_snapshots)
        self.scheduler = Scheduler(
            self.pools,
            budget=budget,
            max_running=capacity.requests,
            max_rows_drawn=rows,
            snapshots=Snapshots(capacity.num_snapshots) if kept else None,
        )
        owners = self.adapters.owners if len(self.adapters.owners) else None
        self._batches = Batches(self.pools, sizes, capacity.requests, self.max_length, self.vocab, owners)
        specs = self._step.cache_specs(self.pools, capacity.requests, 1 + drafts, capacity.cache_dtype)
        _check_memory((specs, kept), runtime.placement)
        self._specs, self._cache = specs, self._step.empty_cache(specs)
        self._states = StateCopies(
            self._step, kept, self.scheduler.groups, lambda sequence: (1 + drafts) * self._batches.slot(sequence)
        )
        self._encoder = EncoderStep(self._step)
        self._last = self._step.no_draws(capacity.requests)
        self._watcher: StepObserver | None = None

    @property
    def step(self) -> Step:
        """As it is compiled."""
        return self._step

    def watch(self, watcher: StepObserver) -> None:
        """Have it compute beside each step from now on."""
        self._watcher = watcher

    def use(self, parameters: Any, variables: Any) -> None:
        """Go on with others, and with the adapters there are; variables of None: with the present ones."""
        self.parameters = self.adapters.kept(self.parameters, placed(self.runtime, parameters))
        self.variables = self.variables if variables is None else variables

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """See `Engine.load_adapter`."""
        self.parameters = placed(self.runtime, self.adapters.load(self.parameters, name, adapter))

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return sum(one.compiles for one in (self._step, self._states, self._encoder, self.adapters))

    def run(
        self, scheduled: Sequence[Scheduled], rows_of: Callable[[Scheduled], list[Row]]
    ) -> tuple[tuple[Scheduled, ...], SampleOutput]:
        """Launch a step: its parts in their order in it, and what will be drawn, one part's rows after the other's;
        `rows_of(part)`: how."""
        self._reserve()
        parts = tuple(self._batches.ordered(scheduled))
        batch = self._batches.make(parts, [row for part in parts for row in rows_of(part)])
        self._cache = self._states.restore(self._cache, parts)
        weights = self.parameters, self.variables
        self._cache = self._encoder.write(*weights, self._cache, parts, self._batches.slot)
        drawn, self._last = self._step.draw(self._logits(batch), self._last, batch.slots, batch.draws)
        self._states.save(self._cache, parts)
        if self._watcher is not None:
            self._watcher.drawn(parts, batch, drawn)
        return parts, drawn

    def draw(self, logits: Array, rows: Sequence[Row]) -> SampleOutput:
        """What is drawn of logits that are no step's, as many as a step may have: the first of them as `rows` say."""
        nowhere = np.full(len(logits), self._batches.slots, np.int32)
        how = draws(rows, len(logits), self.vocab)
        drawn, self._last = self._step.draw(logits, self._last, nowhere, how)
        return drawn

    def warm_up(self) -> None:
        """Compile the programs of all steps that there can be."""
        self._reserve()
        self.adapters.warm_up(self.parameters)
        self._cache = self._states.warm_up(self._cache)
        self._cache = self._encoder.warm_up(self.parameters, self.variables, self._cache)
        for size in self._batches.sizes:
            empty = self._batches.make((), (), size)
            logits = self._logits(empty)
            for how in self._batches.draws(size):
                drawn, self._last = self._step.draw(logits, self._last, empty.slots, how)
                jax.block_until_ready(drawn)
            if self._watcher is not None:
                self._watcher.drawn((), empty, drawn)

    def release(self) -> None:
        """Give the memory of keys, values and states back until the next step. None may run; no prefix is found
        again."""
        assert not self.scheduler.running, "their keys and values would be lost"
        self.scheduler.new_weights()
        self._states.release()
        self._cache = None

    def _reserve(self) -> None:
        if self._cache is None:
            self._cache = self._step.empty_cache(self._specs)
            self._states.reserve()

    def sequence(self, request: Request, number: int, tokens: int) -> Running:
        """The sequence of a request, with room for so many tokens of text. Raises `UserError` for an adapter that is
        not loaded."""
        own, source = as_decoded(self.runtime.module, request)
        prompt = len(own.prompt)
        variant = page_hash(b"", source).hex() if source else self.variant(prompt)
        return Running(own, number, number, prompt + tokens, source, self.adapters.number(request.adapter), variant)

    def variant(self, prompt: int) -> str:
        """As what a prompt of so many tokens is cached."""
        return LONG if self._changes_at is not None and prompt > self._changes_at else ""

    def short_until(self, sequence: Running) -> int | None:
        """The position from which on keys rotate otherwise than this sequence's do; None: they never do."""
        return None if sequence.variant == LONG else self._changes_at

    def restart_longer(self) -> None:
        """Have those computed anew whose next token is at a position by which all of their keys rotate otherwise."""
        if self._changes_at is None:
            return
        for sequence in tuple(self.scheduler.running):
            until = self.short_until(sequence)
            if until is not None and sequence.length > until:
                self.restart(sequence)
                sequence.become(LONG)

    def restart(self, sequence: Running) -> None:
        """Have a running one computed anew."""
        self.scheduler.restart(sequence)
        self._batches.leave(sequence)

    def leave(self, sequence: Running) -> None:
        """Drop a sequence that was preempted."""
        self._batches.leave(sequence)

    def finish(self, sequence: Running) -> None:
        """Drop a sequence that ends."""
        self.scheduler.finish(sequence)
        self._batches.leave(sequence)

    def _logits(self, batch: Batch) -> Array:
        forward = (self._watcher or self._step).logits
        logits, self._cache = forward(self.parameters, self.variables, self._cache, self._last, batch.inputs)
        return logits


def _check_memory(specs: Any, placement: Placement) -> None:
    """Raise `UserError` if a cache alone is more than a device has: Linux would end the process without a message."""
    room, needed = available(placement), sum(map(placement.bytes_per_device, jax.tree.leaves(specs)))
    if room is not None and needed > room:
        size = f"the cache of keys and values needs {gib(needed)} GiB on each device"
        raise UserError(f"{size}, and there are {gib(room)}: lower {ROOM}")
