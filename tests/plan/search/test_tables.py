"""Automatic tables: as good as the hand-made ones where there are some, and there where there are none."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
from flax import nnx

from axon.axes import Execution, base, einsum
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.layout.table import DEFAULT_ROWS
from axon.nn import Auxiliary, Depth, LanguageModel, Param, RMSNorm, Segment
from axon.nn.language_model import RESIDUAL
from axon.nn.router import Routing
from axon.plan.predict.seconds import seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.plan.search.tables import TENSOR, gain, matrices_of, table
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.gpt2 import GPT2
from models.llama import Llama
from models.mixtral import Mixtral
from models.qwen3_next import Qwen3Next

WIDE = {"vocab": 32_000, "embed": 4096, "layers": 2, "heads": 32, "mlp": 14_336, "head_dim": 128}
SIZES = {"batch": 8, "seq": 2048}
EXPERTS = {"kv_heads": 8, "routing": Routing(experts=8, top_k=2)}
DELTA = {
    "kv_heads": 8,
    "shared": 512,
    "routing": Routing(experts=16, top_k=4),
    "layers": 4,
    "mlp": 512,
    "head_dim": 256,
    "delta_heads": 16,
    "per_head": 2,
    "key_dim": 128,
    "value_dim": 128,
}
FAMILIES = {
    "gpt": lambda: GPT2(vocab=50_304, embed=4096, layers=2, heads=32, mlp=16_384, positions=2048),
    "llama": lambda: Llama(**WIDE, kv_heads=8),
    "mixtral": lambda: Mixtral(**WIDE, **EXPERTS),
    "qwen3-next": lambda: Qwen3Next(**WIDE | DELTA),
    "unequal widths": lambda: Own(narrow=2_880),
    "odd heads": lambda: Llama(**WIDE | {"heads": 30}, kv_heads=30),
}


class Mixer(nnx.Module):
    """A gated product over an axis that no table knows."""

    def __init__(self, dims, width="wide"):
        self.width, into = width, f"embed {width}"
        self.norm = RMSNorm("embed", dims)
        self.up, self.gate, self.down = Param(into, dims), Param(into, dims), Param(f"{width} embed", dims)

    def __call__(self, x, inputs, cache=None):
        y, width = self.norm(x, RESIDUAL), self.width
        up, gate = (einsum(f"batch seq embed, embed {width} -> batch seq {width}", y, w) for w in (self.up, self.gate))
        out = einsum(f"batch seq {width}, {width} embed -> batch seq.residual embed", up * gate, self.down)
        return x + out, cache, Auxiliary()

    def cache_specs(self, batch, length):
        return {}


@dataclass(frozen=True)
class Own:
    """Layers of one width, or behind them as many of another."""

    vocab: int = 4096
    embed: int = 4096
    wide: int = 16_384
    narrow: int | None = None

    def build(self):
        dims = {"vocab": self.vocab, "embed": self.embed, "wide": self.wide}
        if self.narrow is None:
            return LanguageModel(dims, Depth(Segment(4, block=Mixer(dims))), RMSNorm("embed", dims), tied=False)
        dims |= {"narrow": self.narrow}
        depth = Depth(Segment(2, wide=Mixer(dims)), Segment(2, narrow=Mixer(dims, "narrow")))
        return LanguageModel(dims, depth, RMSNorm("embed", dims), tied=False)


def made(model, layout=Layout(mesh={"data": 1}), devices=1):
    """Its program, which validates a layout; on one device a model's own axes are whole."""
    rows = {name: None for name in ("wide", "narrow") if vars(model).get(name)}
    layout = replace(layout, rows={**rows, **layout.rows})
    placement = Placement.described(layout, devices, "gpu")
    return Program(model, layout, AdamW(Constant(1e-3)), placement=placement, **SIZES)


def on(name):
    return Target.of(name, dict(CHIPS))


SLOW = [pytest.param(name, marks=pytest.mark.full) for name in ("mixtral", "qwen3-next")]


@pytest.fixture(scope="module", params=["gpt", "llama", "unequal widths", "odd heads", *SLOW])
def work(request):
    return Work.of(made(FAMILIES[request.param]()))


def layout_of(work, rows, tensor):
    kv_heads = work.program.module.dims.get("kv_heads", tensor)
    copies = max(1, tensor // kv_heads) if rows.get("heads", TENSOR) else 1
    return Layout(mesh={"data": 8 // tensor, "tensor": tensor}, rows=rows, replicate_kv=copies)


def step(work, rows, tensor, target):
    layout = layout_of(work, rows, tensor)
    split = Split(work, Placement.described(layout, 8, "gpu"))
    return seconds(Shards(split, layout, Execution(remat="full")), target).total if split.divides else None


def by_hand(work):
    """The default table; of a model with axes of its own those that split one width, or both."""
    names = [name for name in ("wide", "narrow") if name in work.program.module.dims]
    splits = product((TENSOR, None), repeat=len(names))
    return [dict(zip(names, rows, strict=True)) for rows in splits]


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_an_automatic_table_is_accepted_and_at_least_as_fast_as_the_hand_made_one(work, tensor):
    target = on("h100:8")
    rows = table(matrices_of(work), target, tensor, 2)
    automatic, *others = (step(work, one, tensor, target) for one in (rows, *by_hand(work)))
    assert automatic is not None
    made(work.program.runtime.model, layout_of(work, rows, tensor), 8)
    assert all(preset is None or automatic <= preset * (1 + 1e-9) for preset in others)


def test_the_program_finds_the_best_of_all_tables(work):
    matrices, target = matrices_of(work), on("h100:8")
    names = {name for one in matrices for name in one.free if one.sizes.get(name, 1) % 8 == 0}

    def worth(split):
        if any(len(split & one.free) > 1 for one in matrices):
            return float("-inf")
        return sum(gain(matrices, name, target, 8, 2) for name in split)

    every = [{n for n, taken in zip(names, one, strict=True) if taken} for one in product((0, 1), repeat=len(names))]
    rows = table(matrices, target, 8, 2)
    default = {name: TENSOR in DEFAULT_ROWS.get(base(name), ()) for name in names}
    chosen = {name for name in names if rows.get(name, rows.get(base(name), default[name]))}
    assert worth(chosen) == pytest.approx(max(map(worth, every)))


def test_a_model_with_axes_of_its_own_gets_a_table_that_its_program_accepts():
    unsplit = {"wide": None}
    work = Work.of(made(Own()))
    target = on("h100:8")
    rows = table(matrices_of(work), target, 8, 2)
    assert rows["wide"] == TENSOR
    made(Own(), Layout(mesh={"tensor": 8}, rows=rows), 8)
    assert step(work, rows, 8, target) < step(work, unsplit, 8, target) / 2


def test_a_pinned_axis_is_left_as_it_is(work):
    rows = table(matrices_of(work), on("h100:8"), 2, 2, pinned=("mlp", "vocab"))
    assert not {"mlp", "vocab"} & set(rows)
