"""Numbers and names that an optimizer refuses."""

import pytest

from axon.errors import UserError
from axon.train.optimizers import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    Constant,
    Group,
    Lion,
    Muon,
    Optax,
    ScheduleFreeAdamW,
)

RATE = Constant(0.3)
REST = AdamW(RATE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(RATE, clip=0.0), r"AdamW.clip is 0.0; must be in \(0, inf\), or None|AdamW.clip is 0.0"),
        (lambda: AdamW(RATE, b2=1.0), r"AdamW.b2 is 1.0; must be in \[0, 1\)"),
        (lambda: Lion(RATE, b1=1.5), r"Lion.b1 is 1.5; must be in \[0, 1\)"),
        (lambda: SGD(RATE, momentum=1.0), r"SGD.momentum is 1.0; must be in \[0, 1\)"),
        (lambda: SGD(RATE, momentum=0.0, nesterov=True), r"SGD.nesterov = True .* SGD.momentum is 0"),
        (lambda: Adafactor(RATE, decay_power=0.0), r"Adafactor.decay_power is 0.0; must be in \(0, 1\]"),
        (lambda: Adafactor(RATE, b1=-0.1), r"Adafactor.b1 is -0.1; must be in \[0, 1\), or None"),
        (lambda: Muon(RATE, REST, steps=9), r"Muon.steps is 9; must be in \[1, 8\]"),
        (lambda: Muon(RATE, REST, momentum=-1.0), r"Muon.momentum is -1.0; must be in \[0, 1\)"),
        (lambda: EMA(REST, decay=1.0), r"EMA.decay is 1.0; must be in \[0, 1\)"),
        (lambda: EMA(EMA(REST)), r"EMA.optimizer is EMA, which averages by itself"),
        (lambda: SOAP(RATE, every=0), r"SOAP.every is 0; must be at least 1"),
        (lambda: ScheduleFreeAdamW(RATE, b1=0.0), r"ScheduleFreeAdamW.b1 is 0.0; must be in \(0, 1\)"),
        (lambda: EMA(ScheduleFreeAdamW(RATE)), r"EMA.optimizer is ScheduleFreeAdamW, which averages by itself"),
        (lambda: Optax(lambda rate: None, RATE, clip=-1.0), r"Optax.clip is -1.0"),
        (lambda: Group("*", rate=0.5, frozen=True), r"Group of '\*': frozen parameters have neither rate nor decay"),
        (lambda: Group("*", weight_decay=0.0, frozen=True), "frozen parameters have neither rate nor decay"),
        (lambda: Group("*", rate=-1.0), r"Group.rate is -1.0; must be at least 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_muon_refuses_a_name_that_separates_nothing(parameters):
    with pytest.raises(UserError, match=r"Muon.separate: 'head' is an output of none.* Did you mean 'heads'"):
        Muon(RATE, REST, separate=("head",)).transform(parameters)


def test_a_group_of_muon_matches_matrices_and_one_of_the_rest_the_rest(parameters):
    with pytest.raises(UserError, match=r"'embedding/\*' matches none of the parameters that this optimizer updates"):
        Muon(RATE, REST, groups=(Group("embedding/*"),)).transform(parameters)
    with pytest.raises(UserError, match=r"'layers/up' matches none of the parameters that this optimizer updates"):
        Muon(RATE, AdamW(RATE, groups=(Group("layers/up"),))).transform(parameters)


def test_a_group_whose_parameters_are_all_in_groups_before_it_is_refused(parameters):
    one, other = Group("embedding/*", rate=2.0), Group("embedding/*", rate=3.0)
    AdamW(RATE, groups=(one, Group("*"))).transform(parameters)
    for groups in ((one, other), (Group("*"), one)):
        with pytest.raises(UserError, match=r"'embedding/\*' has no effect: all that it matches is in groups before"):
            AdamW(RATE, groups=groups).transform(parameters)
