"""The cross-entropy benchmark says what it promises."""

import json

import pytest

from scripts.bench.cross_entropy import measure


def test_both_forms_are_measured_against_each_other():
    result = measure(tokens=64, embed=8, vocab=512, rounds=2)
    json.dumps(result, allow_nan=False)
    assert result["memory_ratio"] == pytest.approx(result["temporaries"]["blocked"] / result["temporaries"]["naive"])
    assert result["time_ratio"] > 0
    assert set(result["seconds"]) == {"blocked", "naive"}
