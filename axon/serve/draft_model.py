"""A smaller model of the same vocabulary guesses the tokens that follow."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from axon.checks import check_range
from axon.errors import UserError
from axon.runtime import Runtime
from axon.serve.policy import Row
from axon.serve.runner import Runner
from axon.serve.sampler import SampleOutput, on_host
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence
from axon.serve.speculation import Drafts
from axon.serve.step import check_guesses, declared_caches
from axon.serve.stream import Stream


@dataclass(frozen=True)
class DraftModel:
    """Drafts of another model by the same noise, penalties and grammar: where both find the same distribution, they
    draw the same token (drafter-invariant speculation, arXiv:2408.07978).

    Args:
        runtime: of an `axon.nn.LanguageModel` with the target's ids, on the same devices. parameters, variables: nested
            by path, in their places. most: how many tokens are guessed at once: as many steps of this model, of all
            requests together, go before a step of the target.
    """

    runtime: Runtime
    parameters: Any
    variables: Any = None
    most: int = 4

    def __post_init__(self):
        check_range(self, "[1, 64]", "most")

    def start(self, target: Runner) -> "ModelDrafts":
        """Raises `UserError` for a model with other ids, or one that does not go on with a text."""
        check_guesses("DraftModel", declared_caches(self.runtime, 1).values())
        positions = self.runtime.module.max_length
        length = target.max_length if positions is None else min(target.max_length, positions)
        runner = Runner(self.runtime, self.parameters, self.variables, replace(target.capacity, length=length))
        if runner.vocab != target.vocab:
            raise UserError(
                f"the draft model has {runner.vocab} ids, and the model that it guesses for has {target.vocab}; give "
                "one of the same tokenizer and vocabulary"
            )
        return ModelDrafts(runner, self.most)


class Mirror(Sequence):
    """The draft model's own sequence of a request: the tokens that the target drew, and guesses after them.

    Attributes:
        stream: the request's. verified: how many of `tokens` are the target's; only of these pages are made known, and
            released before a window: what is cached of guesses may be rolled back.
    """

    def __init__(self, stream: Stream, variant: str):
        target = stream.sequence
        request = replace(target.request, prompt_logprobs=False)
        super().__init__(request, target.number, target.arrival, target.limit, variant=variant)
        self.stream, self.verified = stream, 0

    @property
    def committed(self) -> int:
        return min(self.cached, self.verified - 1)  # of what is verified the last token may be computed again

    @property
    def guesses(self) -> tuple[int, ...]:
        """The tokens that it drew, as far as they are known."""
        return tuple(self.tokens[self.verified :])

    def follow(self, most: int, page_size: int) -> None:
        """Have the target's tokens, what was computed of guesses that are among them as it is, and draw `most` more."""
        target = self.stream.sequence.tokens
        same = self.verified
        while same < min(len(target), len(self.tokens)) and self.tokens[same] == target[same]:
            same += 1
        self.tokens[same:] = target[same:]
        self.cached = min(self.cached, same, len(target) - 1)
        del self.hashes[same // page_size :]
        self.verified, self.limit = len(target), len(target) + most

    def rest(self) -> None:
        """Draw no more."""
        self.limit = self.length


class ModelDrafts(Drafts):
    """The guesses of a `DraftModel`: an engine in small, which takes `most` steps each time, whatever there is to
    compute: of a long prompt as much as these steps have room for, and the rest the next time. What was right, a mirror
    sees in the target's text."""

    def __init__(self, runner: Runner, most: int):
        self.runner, self.most = runner, most
        self._mirrors: dict[int, Mirror] = {}
        self._flights: deque[tuple[tuple[Scheduled, ...], SampleOutput]] = deque()

    @property
    def compiles(self) -> int:
        return self.runner.compiles

    def warm_up(self) -> None:
        self.runner.warm_up()

    def propose(self, wanted: Mapping[int, tuple[Stream, int]]) -> dict[int, tuple[int, ...]]:
        page_size, mirrors = self.runner.scheduler.groups.size, []
        for stream, most in wanted.values():
            room = min(most, self.runner.max_length - len(stream.sequence.tokens))
            if room > 0 and (mirror := self._mirror(stream)) is not None:
                mirror.follow(room, page_size)
                mirrors.append(mirror)
        self.runner.restart_longer()
        for _ in range(self.most):
            self._step()
        while self._flights:
            self._collect()
        for mirror in mirrors:
            mirror.rest()
        return {mirror.number: mirror.guesses for mirror in mirrors}

    def end(self, number: int) -> None:
        mirror = self._mirrors.pop(number, None)
        if mirror is not None:
            self.runner.finish(mirror)

    def _mirror(self, stream: Stream) -> Mirror | None:
        """None: of a request that this model's pages could not hold."""
        sequence = stream.sequence
        if sequence.number not in self._mirrors:
            if not self.runner.scheduler.groups.fit(sequence.limit):
                return None
            mirror = Mirror(stream, self.runner.variant(sequence.prompt_length))
            self.runner.scheduler.add(mirror)
            self._mirrors[sequence.number] = mirror
        return self._mirrors[sequence.number]

    def _step(self) -> None:
        if self._flights and any(mirror.pending and mirror.needs_host for mirror in self.runner.scheduler.running):
            self._collect()
        plan = self.runner.scheduler.plan()
        for sequence in plan.preempted:
            self.runner.leave(sequence)
        if plan.scheduled:
            self._flights.append(self.runner.run(plan.scheduled, self._rows))

    def _rows(self, part: Scheduled) -> list[Row]:
        mirror = self._mirrors[part.sequence.number]
        return [mirror.stream.row_after(mirror.guesses, part.start + part.count)] if part.rows else []

    def _collect(self) -> None:
        parts, found = self._flights.popleft()
        drawn, row = on_host(found), 0
        for part in parts:
            if part.draws:
                self.runner.scheduler.accepted(part.sequence, [drawn.ids[row]])
            row += part.rows
