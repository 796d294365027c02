"""Plans as compiled: what does not fit is dropped, and what follows is held to the memory that was missing."""

from dataclasses import dataclass

from axon.axes import Execution
from axon.layout import Layout
from axon.plan.predict.memory import Memory
from axon.plan.predict.seconds import Seconds
from axon.plan.report import DoesNotFit
from axon.plan.search import Plan
from axon.plan.search.confirm import Confirmation

ROOM = 1000.0


@dataclass
class Compiler:
    """Programs that need `more` bytes than was predicted."""

    more: float | None

    def __post_init__(self):
        self.asked = []

    def report(self, plan):
        self.asked.append(plan.memory.total)
        needed = None if self.more is None else plan.memory.total + self.more
        if needed is None or needed > ROOM:
            raise DoesNotFit("the step does not fit\nand more", needed)
        return Told(0.0)


@dataclass
class Told:
    compile_seconds: float


def plan(size):
    return Plan(Layout(mesh={"data": 2}), Execution(), Memory({"parameters": size}), Seconds((), 0.5))


def confirmed(compiler, sizes, accept=lambda one: one):
    lines = []
    made = Confirmation(accept, compiler.report, ROOM, lines.append)
    return made, [made(plan(size)) for size in sizes], lines


def test_a_plan_that_does_not_fit_is_dropped_and_those_too_near_are_not_compiled():
    compiler = Compiler(300.0)
    made, taken, lines = confirmed(compiler, [900, 800, 750, 700, 600])
    assert compiler.asked == [900, 700, 600]
    assert made.slack == 300
    assert [one and one.memory.total for one in taken] == [None, None, None, 700, 600]
    assert taken[-1].compiled.compile_seconds == 0
    assert [(one.needed, one.reason) for one in made.dropped] == [(1200, "the step does not fit")]
    assert len(lines) == 3


def test_without_a_size_only_the_plan_itself_is_dropped():
    compiler = Compiler(None)
    made, taken, _ = confirmed(compiler, [900, 800])
    assert (compiler.asked, made.slack, taken) == ([900, 800], 0, [None, None])


def test_what_the_program_refuses_is_not_compiled():
    compiler = Compiler(0.0)
    made, taken, _ = confirmed(compiler, [900], lambda one: None)
    assert (compiler.asked, made.dropped, taken) == ([], [], [None])
