"""Optimizers as a configuration names them."""

from dataclasses import replace
from pathlib import Path

import optax
import pytest

from axon.config import dump, load
from axon.train.optimizers import EMA, AdamW, Group, Linear, Muon, Optax

TINY = Path(__file__).parents[2] / "tiny.gin"
MUON = """
include {tiny!r}
Train.optimizer = @EMA()
EMA.optimizer = @Muon()
EMA.decay = 0.99

Muon.schedule = @Linear()
Muon.rest = @rest/AdamW()
Muon.steps = 4
Muon.separate = ("heads", "kv_heads")
Muon.groups = (@out/Group(),)
Linear.peak = 0.02
Linear.warmup = 10
Linear.steps = 600
out/Group.paths = "*/attention/out"
out/Group.rate = 0.5

rest/AdamW.schedule = @rest/Linear()
rest/AdamW.groups = (@embedding/Group(), @norms/Group())
rest/Linear.peak = 0.006
embedding/Group.paths = "embedding/*"
embedding/Group.rate = 30.0
norms/Group.paths = "*norm*"
norms/Group.frozen = True
"""


@pytest.fixture
def tree(tmp_path):
    """tree(text): what a file with this text describes, once it was written out and read again."""

    def read(text):
        (tmp_path / "run.gin").write_text(text.format(tiny=str(TINY)))
        found = load(tmp_path / "run.gin").tree
        (tmp_path / "again.gin").write_text(dump(found))
        assert load(tmp_path / "again.gin").tree == found
        return found

    return read


def test_muon_and_the_adamw_of_the_rest_have_schedules_and_groups_of_their_own(tree):
    rest = AdamW(Linear(0.006, 10, 600), groups=(Group("embedding/*", rate=30.0), Group("*norm*", frozen=True)))
    muon = Muon(
        Linear(0.02, 10, 600),
        rest,
        steps=4,
        separate=("heads", "kv_heads"),
        groups=(Group("*/attention/out", rate=0.5),),
    )
    assert tree(MUON).optimizer == EMA(muon, decay=0.99)


def test_a_transformation_of_optax_needs_an_import_line(tree):
    text = "from optax import adabelief\ninclude {tiny!r}\nTrain.optimizer = @Optax()\n"
    found = tree(text + "Optax.transformation = @adabelief\nOptax.schedule = @Cosine()\n").optimizer
    assert found == Optax(optax.adabelief, found.schedule)
    assert found == replace(found)
