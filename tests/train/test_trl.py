"""Losses of pairs beside those of `trl` on the same numbers (fixtures/make_trl.py), in float64."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.train.graded_reward import GradedReward
from axon.train.preference import CPO, DPO, IPO, ORPO, Answers, Sides, SimPO

PAIRS = json.loads((Path(__file__).parent / "fixtures" / "trl.json").read_text())
NOTHING = np.zeros((len(PAIRS), 2))


def stored(name):
    return np.array([pair[name] for pair in PAIRS], np.float64)


def expected(name):
    return np.array([pair["losses"][name] for pair in PAIRS])


def sides(values):
    return Sides(*map(jnp.asarray, values.T))


def compared(objective, logps, beside=NOTHING):
    answers = Answers(sides(logps), sides(stored("tokens")), sides(beside))
    return objective.compared(answers)[0]


LOSSES = {
    "dpo": lambda: compared(DPO(beta=0.3), stored("logps"), stored("beside")),
    # trl divides by the number of tokens, which the paper does not
    "ipo": lambda: compared(IPO(beta=0.4), stored("logps") / stored("tokens"), stored("beside") / stored("tokens")),
    "cpo": lambda: compared(CPO(beta=0.2, weight=0.0), stored("logps")),
    "smoothed": lambda: compared(DPO(beta=0.2, smoothing=0.1), stored("logps")),
    "simpo": lambda: compared(SimPO(beta=2.0, gamma=0.7), stored("logps")),
    # of trl λ·log σ(odds) alone
    "odds ratio": lambda: -compared(ORPO(weight=0.3), stored("logps")) - (stored("logps") / stored("tokens"))[:, 0],
    "reward": lambda: GradedReward(tie=1e-12, centring=0.02).compared(sides(stored("scores")), stored("margin")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_trl(name):
    with jax.enable_x64(True):
        found = LOSSES[name]()
    np.testing.assert_allclose(found, expected(name), rtol=1e-6, atol=1e-6)
