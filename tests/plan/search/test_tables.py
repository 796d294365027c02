"""Automatic tables: as good as the hand-made ones where there are some, and there where there are none."""

from dataclasses import dataclass
from itertools import product

import pytest
from flax import nnx
from planning import program

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

WIDE = {"vocab": 32_000, "embed": 4096, "layers": 2, "heads": 32, "mlp": 14_336, "head_dim": 128}
SIZES = {"batch": 8, "seq": 2048}
EXPERTS = {"kv_heads": 8, "routing": Routing(experts=8, top_k=2)}
FAMILIES = {
    "gpt": lambda: Program(
        GPT2(vocab=50_304, embed=4096, layers=2, heads=32, mlp=16_384, positions=2048),
        Layout(mesh={"data": 1}),
        AdamW(Constant(1e-3)),
        placement=Placement.described(Layout(mesh={"data": 1}), 1, "gpu"),
        **SIZES,
    ),
    "llama": lambda: program(platform="gpu", family=Llama, **SIZES, **WIDE, kv_heads=8),
    "mixtral": lambda: program(platform="gpu", family=Mixtral, **SIZES, **WIDE, **EXPERTS),
    "odd heads": lambda: program(platform="gpu", family=Llama, **SIZES, **WIDE | {"heads": 30}, kv_heads=30),
}


def on(name):
    return Target.of(name, dict(CHIPS))


@pytest.fixture(scope="module", params=FAMILIES)
def work(request):
    return Work.of(FAMILIES[request.param](), ["none", "full"])


def step(work, rows, tensor, target):
    kv_heads = work.program.module.dims.get("kv_heads", tensor)
    copies = max(1, tensor // kv_heads) if rows.get("heads", TENSOR) else 1
    layout = Layout(mesh={"data": 8 // tensor, "tensor": tensor}, rows=rows, replicate_kv=copies)
    split = Split(work, Placement.described(layout, 8, "gpu"))
    return seconds(Shards(split, layout, Execution(remat="full")), target).total if split.divides else None


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_an_automatic_table_is_at_least_as_fast_as_the_hand_made_one(work, tensor):
    target = on("h100:8")
    rows = table(matrices_of(work), target, tensor, 2)
    own, preset = (step(work, one, tensor, target) for one in (rows, {}))
    assert own is not None
    assert preset is None or own <= preset * (1 + 1e-9)


def test_the_program_finds_the_best_of_all_tables(work):
    matrices, target = matrices_of(work), on("h100:8")
    names = {name for one in matrices for name in one.free if one.sizes.get(name, 1) % 8 == 0}

    def worth(split):
        if any(len(split & one.free) > 1 for one in matrices):
            return float("-inf")
        return sum(gain(matrices, name, target, 8, 2) for name in split)

    every = [{n for n, taken in zip(names, one, strict=True) if taken} for one in product((0, 1), repeat=len(names))]
    rows = table(matrices, target, 8, 2)
    chosen = {name for name in names if rows.get(name, TENSOR in DEFAULT_ROWS.get(base(name), ()))}
    assert worth(chosen) == pytest.approx(max(map(worth, every)))


class Mixer(nnx.Module):
    """A gated product over an axis that no table knows."""

    def __init__(self, dims):
        self.norm = RMSNorm("embed", dims)
        self.up, self.gate, self.down = Param("embed wide", dims), Param("embed wide", dims), Param("wide embed", dims)

    def __call__(self, x, inputs, cache=None):
        y = self.norm(x, RESIDUAL)
        up, gate = (einsum("batch seq embed, embed wide -> batch seq wide", y, w) for w in (self.up, self.gate))
        return (
            x + einsum("batch seq wide, wide embed -> batch seq.residual embed", up * gate, self.down),
            cache,
            Auxiliary(),
        )

    def cache_specs(self, batch, length):
        return {}


@dataclass(frozen=True)
class Own:
    vocab: int = 4096
    embed: int = 4096
    wide: int = 16_384

    def build(self):
        dims = {"vocab": self.vocab, "embed": self.embed, "wide": self.wide}
        return LanguageModel(dims, Depth(Segment(4, block=Mixer(dims))), RMSNorm("embed", dims), tied=False)


def test_a_model_with_axes_of_its_own_gets_a_table_that_its_program_accepts():
    def made(layout, devices):
        placement = Placement.described(layout, devices, "gpu")
        return Program(Own(), layout, AdamW(Constant(1e-3)), placement=placement, **SIZES)

    unsplit = {"wide": None}
    work = Work.of(made(Layout(mesh={"data": 1}, rows=unsplit), 1), ["none", "full"])
    target = on("h100:8")
    rows = table(matrices_of(work), target, 8, 2)
    assert rows["wide"] == TENSOR
    made(Layout(mesh={"tensor": 8}, rows=rows), 8)
    assert step(work, rows, 8, target) < step(work, unsplit, 8, target) / 2


def test_a_pinned_axis_is_left_as_it_is(work):
    rows = table(matrices_of(work), on("h100:8"), 2, 2, pinned=("mlp", "vocab"))
    assert not {"mlp", "vocab"} & set(rows)
