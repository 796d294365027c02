"""Layouts that serve, and those that do not: told by parameter, axis and remedy before anything is computed."""

import pytest

from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.runtime import Runtime
from axon.serve.check_layout import check_serves
from models.llama import Llama
from models.mixtral import Mixtral, Routing
from models.t5 import T5

LLAMA = Llama(vocab=64, embed=24, layers=1, heads=6, kv_heads=2, mlp=12)
MODELS = {
    "decoder": LLAMA,
    "experts": Mixtral(64, embed=24, layers=1, heads=6, kv_heads=2, mlp=12, routing=Routing(4, 2)),
    "encoder-decoder": T5(vocab=64, embed=24, encoder_layers=1, decoder_layers=1, heads=6, head_dim=4, mlp=12),
}


def check(layout, devices, model=LLAMA):
    check_serves(Runtime(model, layout, placement=Placement.described(layout, devices)))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_row_serves_for_any_axis_that_the_model_names_and_for_no_other(model):
    check(Layout({"data": 3, "tensor": 2}, rows={"heads.attention": "tensor", "embed": "data"}), 6, model)
    with pytest.raises(UserError, match=r"no axis 'headz', so its row has no effect.*'heads'"):
        check(Layout({"tensor": 2}, rows={"headz": "tensor"}), 2, model)


@pytest.mark.parametrize(
    ("layout", "devices", "parts"),
    [
        (
            Layout({"tensor": 4}, replicate_kv=2),
            4,
            ("'heads' of size 6", "divisible by 4", "Likewise"),
        ),
        (Layout({"tensor": 3}), 3, ("attention/key", "'kv_heads' of size 2", "Layout.replicate_kv")),
        (Layout({"data": 2, "pipe": 2}), 4, ("'pipe' = 2 splits 'layers'", "take it out")),
        (Layout({"data": 2}, microbatches=2), 2, ("Layout.microbatches = 2", "of training alone")),
    ],
    ids=["heads", "keys", "stages", "training"],
)
def test_what_does_not_serve_is_told_with_the_remedy(layout, devices, parts):
    with pytest.raises(UserError) as error:
        check(layout, devices)
    for part in parts:
        assert part in str(error.value)
