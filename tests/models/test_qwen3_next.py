"""Qwen3-Next: its published sizes, and its multi-token block under the names that files have."""

from dataclasses import replace

from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import known
from axon.nn import Routing, parameters
from models.qwen3_next import Qwen3Next

TABLE = known()["Qwen3NextForCausalLM"]
PUBLISHED = Qwen3Next(
    151_936, 2048, 48, 16, kv_heads=2, mlp=512, head_dim=256, shared=512, routing=Routing(512, 10),
    delta_heads=16, per_head=2, key_dim=128, value_dim=128, multi_token=True,
)  # fmt: skip
SMALL = Qwen3Next(
    40, 24, 2, 4, kv_heads=2, mlp=12, head_dim=8, shared=20, routing=Routing(4, 2),
    delta_heads=2, per_head=3, key_dim=8, value_dim=6, full_every=2, multi_token=True,
)  # fmt: skip


def test_it_has_the_published_number_of_parameters():
    assert sum(spec.size for spec in parameters(PUBLISHED.build()).values()) == 81_324_862_720


def test_the_multi_token_block_has_its_names_in_published_files():
    """And the order of the joined matrices: first that of the embedding."""
    pieces = pieces_of(TABLE, SMALL.build(), SMALL.vocab)
    block = {name.removeprefix("mtp."): shape for name, shape in pieces.shapes.items() if name.startswith("mtp.")}
    own = {f"{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    assert own == {name for name in block if not name.startswith("layers.0.")}
    assert block["fc.weight"] == (24, 48)
    assert [pieces.of[f"mtp/{name}"][0].start for name in ("from_embedding", "from_hidden")] == [0, 24]
    full = "model.layers.1."  # the model's own layer with attention
    of_layer = {n.removeprefix(full): shape for n, shape in pieces.shapes.items() if n.startswith(full)}
    assert {n.removeprefix("layers.0."): shape for n, shape in block.items() if n not in own} == of_layer


def test_without_the_block_it_has_the_other_arrays():
    pieces, plain = (pieces_of(TABLE, one.build(), 40) for one in (SMALL, replace(SMALL, multi_token=False)))
    assert plain.shapes == {name: shape for name, shape in pieces.shapes.items() if not name.startswith("mtp.")}
