"""Every optimizer, as tests of the rules that hold for all of them take it."""

from typing import Any

from axon.train.optimizers import EMA, SGD, SOAP, Adafactor, AdamW, Constant, Group, Lion, Muon, ScheduleFreeAdamW

RATE = Constant(1e-2)
REST = AdamW(RATE)
EVERY: dict[str, Any] = {
    "AdamW": REST,
    "Lion": Lion(RATE),
    "SGD": SGD(RATE),
    "SGD without momentum": SGD(RATE, momentum=0.0),
    "Adafactor": Adafactor(RATE, b1=0.9),
    "Muon": Muon(RATE, REST),
    "Muon by head": Muon(RATE, REST, separate=("heads",), nesterov=False, scale="rms"),
    "EMA": EMA(REST, decay=0.5),
    "schedule-free": ScheduleFreeAdamW(RATE),
    "SOAP": SOAP(RATE, every=2, eps=1e-3),  # where eps is small, what rounding leaves near 0 makes whole steps
}
BY_GROUP = {"AdamW": AdamW(RATE, groups=(Group("*/mlp/*", rate=0.5), Group("embedding/*", frozen=True)))}
