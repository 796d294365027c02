"""A step of a mixture of experts, compiled for chips that are not here."""

import re
from dataclasses import replace

import pytest

from axon.layout import Execution, Layout
from axon.nn import Routing
from axon.plan.hlo import Module
from axon.plan.topology import devices
from axon.precision import FP8Current, Int8, Precision
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
)


def compiled(model, layout, target, batch, seq, capacity_factor=4.0, recipe=None):
    """The program, and what the compiler made of it; by default with one round for any load."""
    module = "jax_plugins.xla_cuda13" if target.startswith("h200") else "libtpu"
    pytest.importorskip(module, reason="needs its compiler: scripts/setup compilers")
    options = {"execution": Execution(capacity_factor=capacity_factor), "devices": devices(target)}
    options["precision"] = Precision(recipe=recipe)
    program = Program(model, layout, AdamW(Constant(1e-3)), batch=batch, seq=seq, **options)
    return program, program.lower().compile().as_text()


@pytest.mark.full
@pytest.mark.some(target=("v5e:2x2",))
@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_tokens_are_sent_by_ragged_all_to_all(target):
    program, text = compiled(MODEL, Layout({"expert": 4}), target, batch=4, seq=512)
    assert "ragged-all-to-all" in text
    assert program.choices["experts"].startswith("ragged: tokens sent over expert")


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "count", "recipe", "dtype"),
    [("v6e:2x2", 4, Int8(), "s8"), ("tpu7x:2x2x1", 8, FP8Current(), "f8e4m3fn")],
)
def test_rows_are_sent_in_8_bits_where_the_recipe_of_their_products_has_8(target, count, recipe, dtype):
    _, text = compiled(MODEL, Layout({"expert": count}), target, batch=count, seq=512, recipe=recipe)
    assert re.search(rf"= {dtype}\[[0-9,]*\]\S* ragged-all-to-all", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "mesh"),
    [
        ("v5p:2x2x4", {"pipe": 2, "expert": 2, "context": 2, "tensor": 2}),
        ("h200:8", {"pipe": 2, "expert": 2, "context": 2}),
    ],
    ids=["v5p", "h200"],
)
def test_experts_and_a_ring_work_on_the_stages_of_a_pipeline(target, mesh):
    """In one region manual over `pipe`, each works in one that is manual over all else; with overflow rounds."""
    model = replace(MODEL, layers=2, heads=4, mlp=512)
    layout = Layout(mesh, context="ring", microbatches=2)
    program, text = compiled(model, layout, target, batch=4, seq=1024, capacity_factor=1.0)
    assert {"experts", "pipeline", "context"} <= program.choices.keys()
    assert "ragged-all-to-all" in text
    assert any(line.instruction.opcode.startswith("collective-permute") for line in Module.of(text).scheduled)
