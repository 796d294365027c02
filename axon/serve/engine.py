"""The engine: many requests at once through one model, a step at a time."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.runtime import Runtime
from axon.serve.adapters import Adapter
from axon.serve.capacity import Capacity
from axon.serve.drafting import Drafting
from axon.serve.request import Finish, Request, Update, check_ids
from axon.serve.runner import Runner
from axon.serve.sampler import SampleOutput, on_host
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence
from axon.serve.speculation import Drafter, Drafts
from axon.serve.stats import Counts, Stats
from axon.serve.stream import Stream
from axon.serve.text_model import room
from axon.serve.weights import as_stored


@dataclass(frozen=True)
class _Flight:
    """A step that was launched."""

    parts: tuple[Scheduled, ...]
    drawn: SampleOutput


class Engine:
    """Answers requests with a runtime's module and mesh, its parameters in place; to be called from one thread.

    While a step runs on the devices the host prepares the next one. What a request is answered does not depend on what
    runs beside it.

    Args:
        runtime: of an `axon.nn.LanguageModel`, or an encoder–decoder. parameters, variables: nested by path, in their
            places; of what the runtime has in 8 bits also the model's own.
        tokenizer: for texts, and for the ids that end them; without one updates have ids alone.
        capacity: how much at once. drafter: guesses tokens, of which a step then verifies several: `NGram`,
            `DraftModel`, `MultiToken`.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Any,
        variables: Any = None,
        *,
        tokenizer: Tokenizer | None = None,
        capacity: Capacity = Capacity(),
        drafter: Drafter | None = None,
    ):
        """Raises `UserError` for a module that writes no text."""
        self.runtime, self.tokenizer = runtime, tokenizer
        self._runner = Runner(runtime, parameters, variables, capacity, 0 if drafter is None else drafter.most)
        self._scheduler, self.max_length = self._runner.scheduler, self._runner.max_length
        self.vocab = self._runner.vocab
        self._drafting = Drafting(Drafts() if drafter is None else drafter.start(self._runner))
        self._flights: deque[_Flight] = deque()
        self._streams: dict[int, Stream] = {}
        self._kept: list[Update] = []
        self._counts, self._submitted = Counts(), 0

    @property
    def parameters(self) -> Any:
        """In their places, as its steps read them."""
        return self._runner.parameters

    @property
    def variables(self) -> Any:
        return self._runner.variables

    # ---- requests ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is anything to do, or to tell."""
        return bool(self._streams or self._flights or self._kept)

    @property
    def requests(self) -> int:
        """How many run or wait."""
        return len(self._streams)

    def known(self, request: Request) -> int:
        """How many of the first tokens of its prompt are in pages already."""
        return self._scheduler.known(self._runner.sequence(request, 0, 0))

    def room(self, prompt: int) -> int:
        """How many tokens may follow a prompt of so many; below 1, none."""
        return room(self.runtime.module, prompt, self.max_length)

    def submit(self, request: Request) -> int:
        """The number by which updates name it. Raises `UserError` for what can never run, for ids that are none, and
        for an adapter that is not loaded."""
        length = len(request.prompt)
        if (most := self.room(length)) < 1:
            raise UserError(
                f"the prompt has {length} tokens, which leaves no room for a text: sequences have {self.max_length} "
                "positions; shorten the prompt"
            )
        check_ids(request.prompt, self.vocab, self.tokenizer, "the prompt")
        tokens, number = min(request.sampling.tokens, most), self._submitted + 1
        sequence = self._runner.sequence(request, number, tokens)
        self._scheduler.check_fits(sequence.prompt_length, tokens)
        self._runner.adapters.hold(sequence.adapter)
        self._streams[number] = Stream(sequence, self.vocab, self.tokenizer)
        self._drafting.begin(sequence)
        self._scheduler.add(sequence)
        self._submitted = number
        return number

    def cancel(self, number: int) -> None:
        """End a request, of which the last update then says so; nothing, if it has ended."""
        if stream := self._streams.get(number):
            self._end(stream)
            self._kept.append(stream.ended(Finish.CANCELLED))

    def stream(self, request: Request) -> Iterator[Update]:
        """Submit a request, and give its updates as they come. Those of others are the next `step`'s to give."""
        number = self.submit(request)
        others: list[Update] = []
        try:
            while number in self._streams or self._kept:
                updates = self.step()
                others += [update for update in updates if update.request != number]
                yield from [update for update in updates if update.request == number]
        finally:
            self.cancel(number)  # of one whose reader has left
            self._kept = others + [update for update in self._kept if update.request != number]

    def step(self) -> list[Update]:
        """Launch the next step, and say what those before it drew; nothing, where there is nothing to do."""
        if self._flights and any(sequence.needs_host for sequence in self._scheduler.running):
            self._kept += self._collect()
        began = time.perf_counter()
        launched = self._launch()
        self._counts.host_seconds += time.perf_counter() - began
        if self._flights and not (launched and len(self._flights) == 1):
            self._kept += self._collect()
        updates, self._kept = self._kept, []
        return updates

    # ---- the whole --------------------------------------------------------------------------------------------------

    def swap(self, parameters: Any, variables: Any = None) -> None:
        """Go on with other weights of the same module.

        Requests that run keep their text so far, and are computed anew; no prefix of before is found again. Raises
        `UserError` for arrays that are not as the present ones.
        """
        parameters = as_stored(self.runtime, parameters)
        _check_alike(self._runner.parameters, parameters)
        while self._flights:
            self._kept += self._collect()
        for sequence in tuple(self._scheduler.running):
            self._runner.restart(sequence)
        self._scheduler.new_weights()
        self._runner.use(parameters, variables)

    def release(self) -> None:
        """Give the memory of keys and values back until the next request. None may run; no prefix is found again."""
        while self._flights:
            self._kept += self._collect()
        assert not self._streams, "requests would lose what they have"
        self._runner.release()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        return self._runner.adapters.names

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Let requests name it from now on, in the place of one that is loaded under its name: requests of that go on
        with it. There is room where `axon.nn.multi_lora.MultiLoRA` is among the runtime's transforms. Raises
        `UserError`, and changes nothing, for one that has none, or is of another model."""
        self._runner.load_adapter(name, adapter)

    def check_adapter(self, name: str, adapter: Adapter) -> None:
        """Raise `UserError` for one that `load_adapter` refuses."""
        self._runner.adapters.check(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Let no more requests name it; those that run go on. Raises `UserError` for one that is not loaded."""
        self._runner.adapters.unload(name)

    def warm_up(self) -> None:
        """Compile the programs of all steps that there can be: requests wait for none from then on."""
        self._runner.warm_up()
        self._drafting.warm_up()

    def stats(self) -> Stats:
        pools, drafting = self._runner.pools.values(), self._drafting
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages=sum(pool.count - 1 for pool in pools),
            free_pages=sum(pool.free for pool in pools),
            drafted=drafting.drafted,
            accepted=drafting.accepted,
            compiles=self._runner.compiles + drafting.compiles,
            **vars(self._counts),
        )

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Plan a step and launch it; whether there is one."""
        self._runner.restart_longer()
        running = self._scheduler.running
        self._drafting.propose((self._streams[one.number], self._runner.short_until(one)) for one in running)
        plan = self._scheduler.plan()
        for sequence in plan.preempted:
            self._runner.leave(sequence)
        self._count(plan.admitted, plan.preempted)
        if not plan.scheduled:
            return False
        parts, drawn = self._runner.run(plan.scheduled, lambda part: self._streams[part.sequence.number].rows(part))
        self._counts.prompt_tokens += sum(part.prompt_tokens for part in parts)
        self._counts.steps += 1
        self._flights.append(_Flight(parts, drawn))
        return True

    def _collect(self) -> list[Update]:
        """What the oldest step in flight drew, for which it is waited."""
        flight = self._flights.popleft()
        drawn = on_host(flight.drawn)
        began, updates, row = time.perf_counter(), [], 0
        for part in flight.parts:
            first, row = row, row + part.rows
            if part.sequence.finished or not part.rows:
                continue
            stream = self._streams[part.sequence.number]
            ids = stream.accepted(part, drawn, first) if part.draws else []
            if part.draws:
                self._scheduler.accepted(part.sequence, ids)
                self._drafting.verified(part.sequence, len(part.drafts), len(ids) - 1)
            update = stream.update(part, ids, drawn, first)
            if update is None:
                continue
            updates.append(update)
            self._counts.generated_tokens += len(update.ids)
            if update.finish is not None:
                self._end(stream)
        self._counts.host_seconds += time.perf_counter() - began
        return updates

    def _end(self, stream: Stream) -> None:
        self._runner.finish(stream.sequence)
        self._drafting.end(stream.sequence)
        self._runner.adapters.release(stream.sequence.adapter)
        del self._streams[stream.sequence.number]

    def _count(self, admitted: Iterable[Sequence], preempted: Iterable[Sequence]) -> None:
        for sequence in admitted:
            self._counts.prefix_hits += sequence.reused
            self._counts.prefix_queries += len(sequence.tokens)
        self._counts.preemptions += sum(1 for _ in preempted)


def _check_alike(present: Any, new: Any) -> None:
    """Raise `UserError` for parameters with other paths, shapes or dtypes."""

    def described(tree: Any) -> dict[str, str]:
        leaves = jax.tree.flatten_with_path(tree)[0]
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}" for path, x in leaves
        }

    had, has = described(present), described(new)
    wrong = [path for path in {**had, **has} if had.get(path) != has.get(path)]
    if wrong:
        found, expected = has.get(wrong[0], "not there"), had.get(wrong[0], "nothing")
        raise UserError(f"other weights: {wrong[0]} is {found}, and here is {expected}; give those of the same model")
