"""What composes with what: every pair of parts is a program, or refused by both names and with a way out."""

import re
from dataclasses import dataclass, field, replace
from itertools import combinations

import pytest

from axon.composition import Part, check_composition
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.parallel.outer import DiLoCo, SlowMo
from axon.parallel.pipeline.schedules import OneFOneB, TwoBW
from axon.precision import Int8, LossScale, Precision
from axon.train.distillation import Distillation
from axon.train.faults import Faults
from axon.train.kto import KTO
from axon.train.optimizers import EMA, AdamW, Constant, OneBitAdam
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=32, embed=8, layers=2, heads=2, kv_heads=2, mlp=8)
ADAM = AdamW(Constant(1e-3))


class AcrossLayers(AdamW):
    """An optimizer that does not say that it updates each layer by itself."""

    by_layer = False


@dataclass(frozen=True)
class Change:
    """What a part changes of a run without any; `said`: a pattern of what a message calls it."""

    said: str
    mesh: dict = field(default_factory=dict)
    layout: dict = field(default_factory=dict)
    execution: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


REPLICAS = {"replica": 2}
PIPE = {"mesh": {"pipe": 2}}
PARTS = {
    "stages": Change("stages along 'pipe'", **PIPE, layout={"schedule": OneFOneB(), "microbatches": 2}),
    "no flush": Change(
        "(Layout.schedule = TwoBW|stages along 'pipe')", **PIPE, layout={"schedule": TwoBW(), "microbatches": 4}
    ),
    "optimizer on the host": Change(r"Execution.host = \('optimizer',\)", execution={"host": ("optimizer",)}),
    "all on the host": Change(r"Execution.host = \('params', ", execution={"host": ("params", "optimizer")}),
    "disk": Change(r"Execution.disk = \{'optimizer'", execution={"disk": {"optimizer": "scratch"}}),
    "DiLoCo": Change("Train.outer = DiLoCo", mesh=REPLICAS, options={"outer": DiLoCo(every=2)}),
    "SlowMo": Change("Train.outer = SlowMo", mesh=REPLICAS, options={"outer": SlowMo(every=2)}),
    "1-bit": Change("OneBitAdam", mesh=REPLICAS, options={"optimizer": OneBitAdam(Constant(1e-3), warmup=1)}),
    "frozen models": Change(
        "Train.references", options={"objective": Distillation(), "references": {"teacher": MODEL}}
    ),
    "whole batch": Change(
        "Train.(objective = KTO|references)", options={"objective": KTO(), "references": {"reference": MODEL}}
    ),
    "averages": Change("Train.optimizer = ", options={"optimizer": EMA(ADAM)}),
    "across layers": Change("Train.optimizer = ", options={"optimizer": AcrossLayers(Constant(1e-3))}),
    "skips": Change("Faults.not_finite = 'skip'", options={"faults": Faults(not_finite="skip")}),
    "rolls back": Change("Faults.not_finite = 'rollback'", options={"faults": Faults(not_finite="rollback")}),
    "replays": Change("Faults.replay_every = 2", options={"faults": Faults(replay_every=2)}),
    "recipe": Change("Precision.recipe", options={"precision": Precision(recipe=Int8(emulate=True))}),
    "scaled loss": Change("Precision.loss_scale", options={"precision": Precision("float16", loss_scale=LossScale())}),
}
TIERS, OUTER = ("optimizer on the host", "all on the host", "disk"), ("DiLoCo", "SlowMo")
JOINT = "frozen models", "whole batch"
REFUSED = {
    *(("stages", other) for other in ("disk", "1-bit")),
    *(("no flush", other) for other in (*TIERS, *OUTER, "1-bit", "rolls back")),
    *((tier, other) for tier in TIERS for other in (*OUTER, "1-bit", "across layers", "skips", "replays")),
    *((method, other) for method in OUTER for other in ("1-bit", "averages", *JOINT)),
    *(("1-bit", other) for other in JOINT),
    ("no flush", "whole batch"),
    *((one, "scaled loss") for one in ("no flush", *TIERS, *OUTER, "1-bit")),
}
SAME_FIELD = (
    *({"stages", "no flush"}, {"optimizer on the host", "all on the host"}, {"DiLoCo", "SlowMo"}),
    *({"optimizer on the host", "disk"}, {"all on the host", "disk"}, {"1-bit", "averages", "across layers"}),
    *({"skips", "rolls back", "replays"}, {"recipe", "scaled loss"}, {*JOINT}),
)
PAIRS = [(a, b) for a, b in combinations(PARTS, 2) if not any({a, b} <= one for one in SAME_FIELD)]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_of_parts_is_a_program_or_refused_by_both_names(pair):
    changes = [PARTS[name] for name in pair]
    layout = Layout(mesh={"data": 1} | changes[0].mesh | changes[1].mesh, **(changes[0].layout | changes[1].layout))
    options = {"optimizer": ADAM} | changes[0].options | changes[1].options
    execution = Execution(**(changes[0].execution | changes[1].execution))

    def program():
        return Program(MODEL, layout, batch=8, seq=4, execution=execution, **options)

    if pair not in REFUSED:
        program()
        return
    with pytest.raises(UserError) as refused:
        program()
    message = str(refused.value)
    assert all(re.search(change.said, message) for change in changes), message
    assert re.search(" cannot be combined: .*, or ", message)


def test_a_part_of_ones_own_says_what_it_excludes():
    mine = Part("Mine", "leave it out", excludes={"theirs": "of a reason"})
    theirs = Part("Theirs", "use another", frozenset({"theirs"}))
    check_composition([mine, replace(theirs, traits=frozenset())])
    with pytest.raises(
        UserError, match=r"^Mine and Theirs cannot be combined: of a reason\. Leave it out, or use another$"
    ):
        check_composition([theirs, mine])
