"""Pairs with margins and ties: read from their columns, one number a pair, and refused by place."""

import json
from dataclasses import replace

import numpy as np
import pytest

from axon.data import Bpe, JsonLines
from axon.errors import UserError
from axon.train.graded_reward import MARGINS, TIE, GradedReward
from axon.train.preference import Reward
from axon.tune import GradedComparisons


def silent(line):
    pass


def graded(path, records, **fields):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {"seq": 128, "batch": 2, "tokenizer": Bpe(vocab=257), "held_out": 0.0, "threads": 0}
    return GradedComparisons(sources=(JsonLines(str(path)),), **{**defaults, **fields})


@pytest.mark.parametrize("cut", [False, True])
def test_each_pair_has_its_margin(cut, tmp_path, rng, caches):
    margins = [None, 0, 2, float(np.float32(rng.uniform(0, 3)))]
    records = [{"prompt": f"{n}", "chosen": "ab" * 20, "rejected": "b", "margin": one} for n, one in enumerate(margins)]
    records += [{"prompt": "t", "chosen": "a" * 40, "rejected": "b", "tie": True, "margin": 3}]
    data = graded(tmp_path / "x.jsonl", records, seq=100 if cut else 160, long="cut", packed=1)
    batch = data.prepare(silent).splits["train"].batch(np.arange(5))
    objective = GradedReward()
    assert batch.keys() == objective.specs(5, data.seq).keys()
    data.check_objective(objective)
    found = np.asarray(objective.margins(batch))[:, 0]
    np.testing.assert_array_equal(sorted(found), sorted([TIE, *(one or 0 for one in margins)]))
    assert np.count_nonzero(batch[MARGINS]) == 2 * 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"margin": -1}, r"x\.jsonl:1: column 'margin' has -1; expected a number"),
        ({"margin": True}, r"'margin' has True"),
        ({"tie": "yes"}, r"x\.jsonl:1: column 'tie' has 'yes'; expected true or false"),
    ],
)
def test_what_is_no_margin_is_refused(more, said, tmp_path, caches):
    data = graded(tmp_path / "x.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c", **more}])
    with pytest.raises(UserError, match=said):
        data.prepare(silent)
    with pytest.raises(UserError, match=r"a Reward: set Train\.objective = @GradedReward"):
        data.check_objective(Reward())
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "by": -1}) + "\n")
    with pytest.raises(UserError, match=r"column 'by' has -1"):
        replace(data, columns={"margin": "by"}).prepare(silent)
