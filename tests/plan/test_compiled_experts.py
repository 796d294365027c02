"""A step of a mixture of experts, compiled for chips that are not here."""

import pytest

from axon.layout import Layout
from axon.nn import Routing
from axon.plan.topology import devices
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.mixtral import Mixtral

MODEL = Mixtral(
    vocab=512,
    embed=256,
    layers=1,
    heads=2,
    kv_heads=2,
    mlp=256,
    routing=Routing(8, 2, sequence_loss=0.01),
    margin=4.0,  # one round for any load
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "module"), [("v5e:2x2", "libtpu"), ("h200:4", "jax_plugins.xla_cuda13")], ids=["v5e", "h200"]
)
def test_tokens_are_sent_by_ragged_all_to_all(target, module):
    pytest.importorskip(module, reason="needs its compiler: scripts/setup compilers")
    optimizer = AdamW(Constant(1e-3))
    program = Program(MODEL, Layout({"expert": 4}), optimizer, batch=4, seq=512, devices=devices(target))
    text = program.lower().compile().as_text()
    assert "ragged-all-to-all" in text
    assert program.choices["experts"].startswith("ragged: tokens sent over expert")
