"""Which requests run in a step, and how many tokens of each.

A sequence is (tokens cached, tokens scheduled), and that pair is all: one that decodes has one token to schedule, one
that prefills many, and drafts to verify are tokens past its end. The rules:

- Running sequences are served in their order: the higher priority first, then the earlier arrival. Each that is ready
  has one token of the budget and one row for certain, so none waits for the budget. Then come the drafts of those that
  decode, and what is left is shared out equally among those that prefill; what one does not need goes to the first.
- A step may be planned while others are in flight. One that draws makes the token `pending`, and the device knows it;
  where the host has to (`Sequence.needs_host`, or drafts in flight), the sequence is left out until it does.
- Where pages are short, drafts and chunks are cut; where there is none, the last running sequence in the order is
  preempted: it loses its pages, which stay in the prefix cache, and waits in its order to be computed again. The last
  itself stays, and waits a step. The first can take the pages of all others, so that it always goes on.
- A waiting sequence is admitted when all pools have the pages for its tokens, and those that run for theirs; none is
  admitted before an earlier one for whom there is no room. Only one whose prefix another is computing is passed by,
  and one of which a token is pending.
- Where there is no room for the first that waits, and there would be without running ones of a lower priority, these
  are preempted, the last first, until there is.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from axon.errors import UserError
from axon.serve.block_tables import BlockTables
from axon.serve.pages import PagePool
from axon.serve.sequence import Sequence
from axon.serve.snapshots import Snapshots


class Scheduled(NamedTuple):
    """A sequence's part in a step; a tuple, as a step has one for each sequence and its host time is short.

    Args:
        sequence: whose. start: tokens that were cached before: the position of the first one now. count: tokens in this
            step, `drafts` included, which are the last ones. rows: of how many of them, the last ones, logits are
            needed. draws: whether it reaches the end: the token at the end, and after each draft, is drawn.
        from_device: whether its token (then there is one) was drawn by a step in flight and is not known on the host.
        state_version: see `Sequence.state_version`, before this step.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...]
    rows: int
    draws: bool
    from_device: bool
    state_version: int = 0

    @property
    def begins(self) -> bool:
        """Whether it is the first since its sequence was admitted."""
        return self.start == self.sequence.reused

    @property
    def prompt_tokens(self) -> int:
        """How many of its tokens are the prompt's."""
        return max(0, min(self.start + self.count, self.sequence.prompt_length) - self.start)


@dataclass(frozen=True)
class Plan:
    """A step: what runs, and which sequences began (`Sequence.reused` says with how many tokens) or were preempted."""

    scheduled: tuple[Scheduled, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


class Scheduler:
    """Plans steps over the pools (window, None: full attention → pool).

    Args:
        budget: tokens a step. max_running: sequences that have pages at once. max_rows_drawn: rows of logits a step.
        max_prefilling: sequences that prefill at once, unless all of their tokens fit into the budget.
        snapshots: of states, where sequences have any.

    The caller launches each plan before it asks for the next, in order, and says what each draws, `accepted`, in order.
    """

    def __init__(
        self,
        pools: Mapping[int | None, PagePool],
        *,
        budget: int,
        max_running: int,
        max_rows_drawn: int,
        max_prefilling: int = 8,
        snapshots: Snapshots | None = None,
    ):
        """Raises `UserError` unless each running sequence can have a token and a row of a step."""
        for name, value in (("budget", budget), ("max_rows_drawn", max_rows_drawn)):
            if not 1 <= max_running <= value:
                raise UserError(
                    f"{name} is {value}, and max_running is {max_running}; must be at least as many, and 1 or more"
                )
        self.groups, self.budget, self.max_running = BlockTables(pools, snapshots), budget, max_running
        self.max_rows_drawn, self.max_prefilling = max_rows_drawn, max_prefilling
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        """Both in the order in which they are served."""
        self._version = 0
        self._spare_rows = 0

    def check_fits(self, prompt: int, tokens: int) -> None:
        """Raise `UserError` for a prompt of so many tokens and so many to generate that can never run."""
        self.groups.check_fits(prompt, tokens)

    def known(self, sequence: Sequence) -> int:
        """How many first tokens of a new one are in pages already."""
        sequence.use_weights(self._version)
        return self.groups.prefix(sequence)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait from now on, which has `check_fits` behind it."""
        _insert(self.waiting, sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whether it waits or runs; steps in flight with it are of no interest any more."""
        if sequence.finished:
            return
        if sequence in self.running:
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.finished = True

    def cancel(self, number: int) -> Sequence | None:
        """`finish` the sequence with this number, and return it; None if there is none."""
        found = next((s for s in (*self.running, *self.waiting) if s.number == number), None)
        if found is not None:
            self.finish(found)
        return found

    def accepted(self, sequence: Sequence, ids: Iterable[int]) -> None:
        """What the oldest step in flight that draws for it drew: one token, after the drafts that it accepted."""
        if not sequence.finished:
            sequence.accept(ids)

    def restart(self, sequence: Sequence) -> None:
        """A running one loses its pages and waits in its order, to be computed anew."""
        self._release(sequence)
        self.running.remove(sequence)
        _insert(self.waiting, sequence)

    def new_weights(self) -> None:
        """Steps launched from now on have other weights: no prefix of before is found again.

        Running sequences go on with the keys and values that they have.
        """
        self._version += 1
        for known in (*self.groups.pools.values(), *([self.groups.snapshots] if self.groups.snapshots else [])):
            known.forget_all()

    def plan(self) -> Plan:
        """The next step, perhaps an empty one. Its tokens count as cached and its draws as pending from now on."""
        for sequence in self.running:
            self._settle(sequence)
        displaced = self._preempt_for_waiting()
        admitted = self._admit(displaced)
        ready = [sequence for sequence in self.running if sequence.is_ready]
        shares, self._spare_rows = self._shares(ready), self.max_rows_drawn - len(ready)
        scheduled, preempted = [], []
        for sequence in ready:
            if sequence in preempted:  # and so are all after it
                break
            room = self._preempt_for(sequence, preempted)
            most = self.groups.to_border(sequence, min(shares[sequence.number], room))
            if count := self._count(sequence, most):
                scheduled.append(self._schedule(sequence, count))
        return Plan(tuple(scheduled), tuple(s for s in admitted if s not in preempted), (*displaced, *preempted))

    def _shares(self, ready: list[Sequence]) -> dict[int, int]:
        """Number → tokens of the budget."""
        shares, spare = {sequence.number: 1 for sequence in ready}, self.budget - len(ready)
        drafting, prefilling = [], []
        for sequence in ready:
            remaining = sequence.remaining
            if more := remaining - 1 + sequence.usable_drafts:
                (drafting if remaining == 1 else prefilling).append((sequence.number, more))

        def give(some: list[tuple[int, int]], most: int) -> None:
            nonlocal spare
            for number, wanted in some:
                more = min(wanted + 1 - shares[number], most, spare)
                shares[number] += more
                spare -= more

        give(drafting, spare)
        give(prefilling, spare // max(1, len(prefilling)))
        give(prefilling, spare)
        return shares

    def _count(self, sequence: Sequence, most: int) -> int:
        """How many of so many tokens the rows left allow."""
        return most if most <= 1 else most - max(0, sequence.rows(most) - 1 - self._spare_rows)

    def _schedule(self, sequence: Sequence, count: int) -> Scheduled:
        self.groups.extend(sequence, count)
        start, rows, draws = sequence.cached, sequence.rows(count), count >= sequence.remaining
        from_device, version = draws and sequence.pending > 0, sequence.state_version
        self._spare_rows -= max(0, rows - 1)
        return Scheduled(sequence, start, count, sequence.advance(count), rows, draws, from_device, version)

    def _preempt_for(self, sequence: Sequence, preempted: list[Sequence]) -> int:
        """Preempt the last running ones until `sequence` has room for a token or is the last: how many it has."""
        while not (room := self.groups.room(sequence)) and self.running[-1] is not sequence:
            preempted.append(self._preempt_last())
        return room

    def _preempt_last(self) -> Sequence:
        victim = self.running.pop()
        self._release(victim)
        _insert(self.waiting, victim)
        return victim

    def _preempt_for_waiting(self) -> list[Sequence]:
        """Preempt running ones of a lower priority than the first that waits, if there is room for it then."""
        if not self.waiting or not self.running or not self._outranks(first := self.waiting[0], self.running[-1]):
            return []
        if first.pending or self._prefills_enough(first):
            return []
        first.use_weights(self._version)
        if self.groups.is_coming(first, self.groups.prefix(first), self.running):
            return []
        lower = [other for other in self.running if self._outranks(first, other)]
        displaced: list[Sequence] = []
        if self._may_begin(first, self.running[: -len(lower)], lower):
            while len(displaced) < len(lower) and not self._may_begin(first, self.running):
                displaced.append(self._preempt_last())
        return displaced

    @staticmethod
    def _outranks(one: Sequence, other: Sequence) -> bool:
        return one.request.priority > other.request.priority

    def _may_begin(self, sequence: Sequence, running: list[Sequence], without: Iterable[Sequence] = ()) -> bool:
        """Whether one can run beside those that run; `without`: others, as if their pages were free."""
        if len(running) == self.max_running:
            return False
        costs, needs = self.groups.costs(sequence, self.groups.prefix(sequence)), map(self.groups.needs, running)
        return not running or self._has_room(costs, [*needs], without)

    def _admit(self, displaced: list[Sequence]) -> list[Sequence]:
        """Let those of the waiting run for whom there is room; none from the first of the `displaced` on."""
        admitted, needs = [], None
        for sequence in tuple(self.waiting):
            if sequence in displaced or len(self.running) == self.max_running or self._prefills_enough(sequence):
                break
            if sequence.pending:
                continue
            needs = needs or [self.groups.needs(other) for other in self.running]
            sequence.use_weights(self._version)
            prefix = self.groups.prefix(sequence)
            if self.groups.is_coming(sequence, prefix, self.running):
                continue
            if self.running and not self._has_room(self.groups.costs(sequence, prefix), needs):
                break
            self.groups.begin(sequence, prefix)
            needs.append(self.groups.needs(sequence))
            self.waiting.remove(sequence)
            _insert(self.running, sequence)
            admitted.append(sequence)
        return admitted

    def _prefills_enough(self, sequence: Sequence) -> bool:
        """Whether as many prefill as may, and the budget has not room for all of their tokens."""
        prefilling = [other.remaining for other in self.running if other.remaining > 1]
        if len(prefilling) < self.max_prefilling:
            return False
        decoding = len(self.running) - len(prefilling)
        return sum(prefilling) + decoding + sequence.remaining > self.budget

    def _has_room(
        self, costs: Mapping[int | None, int], needs: list[dict[int | None, int]], without: Iterable[Sequence] = ()
    ) -> bool:
        for window, pool in self.groups.pools.items():
            pages = [page for one in without for page in one.pages[window][one.first[window] :]]
            free = pool.free + sum(pool.references(page) == 1 for page in pages)
            if free < costs[window] + sum(need[window] for need in needs):
                return False
        return True

    def _settle(self, sequence: Sequence) -> None:
        self.groups.settle(sequence, register=sequence.version == self._version)

    def _release(self, sequence: Sequence) -> None:
        self._settle(sequence)
        self.groups.release(sequence)


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    insort(sequences, sequence, key=attrgetter("order"))
