"""docs/planner.md: what it says is predicted is what is predicted."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from axon.axes import Execution
from axon.chips import chips
from axon.chips.target import Target
from axon.config import load
from axon.layout import Layout, Placement
from axon.parallel.pipeline import Interleaved
from axon.plan.predict.memory import memory
from axon.plan.predict.seconds import seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.precision import Precision
from axon.run import program
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planner.md").read_text()
TARGETS = {"v5e_4x4": "v5e:4x4", "v6e_16x16": "v6e:16x16", "h200_8": "h200:8", "h200_64": "h200:64"}
TARGETS |= {f"v5p_{shape}": f"v5p:{shape}" for shape in ("4x4x4", "4x4x8", "8x8x8", "16x16x16")}
STREAM = {"seq.residual": ("context", "tensor")}
ALONE = Layout(mesh={"data": 1})


def rows(heading):
    """(config, remat, predicted) of a table; a row without a config is of the one before it."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    config = ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.match(r"[\d.]+$", cells[2]):
            found = re.match(r"`(\w+)`", cells[0])
            config = found[1] if found else "" if cells[0].startswith("Llama") else config
            if config:
                yield config, cells[1], float(cells[3])


def predicted(config, remat):
    target = Target.of(next(on for end, on in TARGETS.items() if config.endswith(f"_{end}")), dict(chips()))
    tree = load(ROOT / f"configs/pods/{config}.gin").tree
    policy = remat if remat in ("none", "full", "minimal") else tuple(remat.split(", "))
    alone = program(replace(tree, layout=ALONE), Placement.described(ALONE, 1, target.platform))
    work = Work.of(alone, dict.fromkeys(["none", "full", policy]))
    split = Split(work, Placement.described(tree.layout, target.devices, target.platform))
    return Shards(split, tree.layout, Execution(remat=policy)), target


MEMORY = list(rows("Memory, beside compiled programs"))
SECONDS = list(rows("Seconds, beside what the compiler says of our pods"))
FIRST = ("llama3_8b_v5p_4x4x4", "full")


def cases(found):
    return [
        pytest.param(*row, marks=() if row[:2] == FIRST else pytest.mark.full, id=f"{row[0]}-{row[1]}") for row in found
    ]


def test_the_tables_have_their_rows():
    assert (len(MEMORY), len(SECONDS)) == (20, 15)


@pytest.mark.parametrize(("config", "remat", "told"), cases(MEMORY))
def test_memory_is_as_told(config, remat, told):
    assert memory(predicted(config, remat)[0]).gib == pytest.approx(told, rel=0.005)


@pytest.mark.parametrize(("config", "remat", "told"), cases(SECONDS))
def test_seconds_are_as_told_at_the_compilers_rate(config, remat, told):
    shards, target = predicted(config, remat)
    rate = {"v5p": 0.96, "v6e": 0.88, "v5e": 0.72}[target.chip.name]
    target = replace(target, chip=replace(target.chip, sustained=rate))
    assert seconds(shards, target).total == pytest.approx(told, rel=0.005)


def llama(vocab, layers, embed, heads, kv_heads, mlp):
    return Llama(vocab=vocab, layers=layers, embed=embed, heads=heads, kv_heads=kv_heads, mlp=mlp)


H100S = Layout({"pipe": 16, "data": 128, "tensor": 8}, STREAM, zero=1, microbatches=16, pad_layers=True)
PUBLISHED = {
    "Llama 3 405B": (
        (llama(128_256, 126, 16_384, 128, 8, 53_248), 8192, 2048),
        ("h100:2048x8", replace(H100S, schedule=Interleaved(4)), "none", 0.411),
    ),
    "Llama-2-70B": (
        (llama(32_000, 80, 8192, 64, 8, 28_672), 4096, 2048),
        ("v5p:8x8x8", Layout({"data": 512}, zero=3), "minimal", 0.674),
    ),
    "Llama-3.1-8B": (
        (llama(128_256, 32, 4096, 32, 8, 14_336), 8192, 1024),
        ("v6e:16x16", Layout({"data": 256}, zero=3), "full", 0.481),
    ),
    "Llama-3.1-405B": (
        (llama(128_256, 126, 16_384, 128, 8, 53_248), 8192, 64),
        ("v6e:16x16", Layout({"data": 64, "tensor": 4}, STREAM, zero=3), "full", 0.396),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.full if one != "Llama-3.1-8B" else ()) for one in PUBLISHED]
)
def test_utilisation_of_published_runs_is_as_told(name):
    (model, seq, batch), (on, layout, remat, told) = PUBLISHED[name]
    target = Target.of(on, dict(chips()))
    placement = Placement.described(ALONE, 1, target.platform)
    sizes = {"batch": batch, "seq": seq, "precision": Precision(reduce="bfloat16" if layout.zero == 3 else "float32")}
    alone = Program(model, ALONE, AdamW(Constant(1e-3)), placement=placement, **sizes)
    work = Work.of(alone, dict.fromkeys(["none", "full", remat]))
    split = Split(work, Placement.described(layout, target.devices, target.platform))
    found = seconds(Shards(split, layout, Execution(remat=remat)), target)
    assert found.mfu == pytest.approx(told, rel=0.01)
