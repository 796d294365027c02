"""measure_decode(): what a decode step over a paged cache is said to take, at a tiny size."""

from scripts.bench import paged


def test_each_shape_has_both_times_and_their_ratio(monkeypatch):
    monkeypatch.setattr(paged, "SHAPES", ((4, 2, 4),))
    (name, made), *rest = paged.measure_decode(sequences=2, context=8, room=2, rounds=3).items()
    assert (name, rest) == ("heads 4, kv_heads 2, pages of 4", [])
    assert made["reference_ms"] > 0
    assert made["xla_ms"] > 0
    assert 0 < made["ratio"] < 1e3
    assert made["error"] >= 0
