"""Plans compiled for the machine itself: those that do not fit are dropped, and what follows is held to more."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from axon.plan.report import DoesNotFit, Report
from axon.plan.search.plans import Acceptance, Plan


@dataclass(frozen=True)
class Dropped:
    """A plan that does not fit as compiled. `needed`: bytes of a device, at least, if the compiler says them."""

    plan: Plan
    reason: str
    needed: float | None


@dataclass
class Confirmation:
    """Accepts plans by compiling them, one at a time; an `Acceptance`.

    Args:
        accept: asked first, before anything is compiled. report: of a plan as compiled; raises `DoesNotFit`.
        room: bytes of a device. say: told of each plan that is compiled, in a line.
        slack: by how many bytes programs that did not fit need more than was predicted, at most. A plan that would not
            fit if it needed so much more is not compiled.
        dropped: what did not fit, in the order in which it was compiled.
    """

    accept: Acceptance
    report: Callable[[Plan], Report]
    room: float
    say: Callable[[str], None]
    slack: float = 0.0
    dropped: list[Dropped] = field(default_factory=list)

    def __call__(self, plan: Plan) -> Plan | None:
        """The plan with its report; None for one that is refused, or does not fit."""
        if plan.memory.total + self.slack > self.room or self.accept(plan) is None:
            return None
        try:
            made = self.report(plan)
        except DoesNotFit as error:
            self._drop(plan, error)
            return None
        self.say(f"{_name(plan)}: fits, compiled in {made.compile_seconds:.0f} s")
        return replace(plan, compiled=made)

    def _drop(self, plan: Plan, error: DoesNotFit) -> None:
        reason = str(error).splitlines()[0]
        self.dropped.append(Dropped(plan, reason, error.needed))
        if error.needed is not None:
            self.slack = max(self.slack, error.needed - plan.memory.total)
        self.say(f"{_name(plan)}: dropped, {reason}")


def _name(plan: Plan) -> str:
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.layout.mesh.items())
    return f"{mesh}, ZeRO {plan.layout.zero}, remat {plan.carried_out}"
