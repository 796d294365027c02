"""OLMo 2 and 3: which layers see what, and published sizes."""

import pytest

from axon.nn import Rope, YarnScaling, parameters
from models.olmo import Olmo

BASE = {"vocab": 40, "embed": 24, "layers": 5, "heads": 4, "kv_heads": 2, "mlp": 32}


@pytest.mark.parametrize("window", [None, 4096])
def test_published_shapes_have_the_published_number_of_parameters(window):
    """OLMo 2 7B, and OLMo 3 7B, which has as many."""
    config = Olmo(100_352 - 74, 4096, 32, heads=32, kv_heads=32, mlp=11008, vocab_multiple=128, window=window)
    assert sum(spec.size for spec in parameters(config.build()).values()) == 7_298_617_344


def test_of_four_layers_one_sees_everything_and_the_others_a_window():
    config = Olmo(**BASE, window=7, rope=Rope(1e4, YarnScaling(8.0)), local_rope=Rope(1e4))
    kinds = {layer: b.attention for b in config.build().layers.blocks.values() for layer in b.mlp.up.layers}
    assert sorted(kinds) == list(range(5))
    for layer, attention in kinds.items():
        full = layer == 3
        assert ("window 7" in str(attention.config.mask)) != full
        assert attention.rope == (config.rope if full else config.local_rope)


def test_norms_of_queries_and_keys_are_over_all_heads_and_no_weight_decay_pulls_at_them():
    specs = parameters(Olmo(**BASE).build())
    found = {path: specs[f"layers/block/attention/{path}_norm/scale"] for path in ("query", "key")}
    assert {path: spec.shape for path, spec in found.items()} == {"query": (5, 4, 6), "key": (5, 2, 6)}
    assert not any(spec.decay for spec in found.values())
