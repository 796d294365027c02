"""Which checkpoints are kept, by step, by time and by held-out loss."""

from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from axon.checkpoint import Checkpoints
from axon.checkpoint.keep import kept

BEGAN = datetime(2026, 11, 23)
SAVED = [SimpleNamespace(step=n, time=BEGAN + timedelta(minutes=40 * n), metrics=None) for n in range(10)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"keep": 2}, [8, 9]),
        ({"keep": 1, "keep_every": 4}, [0, 4, 8, 9]),
        ({"keep": 1, "keep_hours": 2}, [0, 3, 6, 9]),
        ({"keep": 1, "keep_hours": 0.5}, list(range(10))),
        ({"keep": 1, "keep_best": 2}, [3, 5, 9]),
        ({"keep": 1, "keep_every": 8, "keep_best": 1}, [0, 3, 8, 9]),
    ],
)
def test_a_checkpoint_is_kept_if_any_rule_keeps_it(settings, steps):
    losses = {0: 9.0, 3: 1.0, 5: 2.0, 6: 3.0, 100: 0.5}
    keep = kept(Checkpoints(every=1, **settings), losses).should_preserve(SAVED, context=None)
    assert [one.step for one, is_kept in zip(SAVED, keep, strict=True) if is_kept] == steps
