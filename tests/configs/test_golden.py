"""What each file of configs/ means, as text.

After a deliberate change, write the texts anew and look at the difference:

    AXON_REWRITE_GOLDEN=1 .venv/bin/python -m pytest tests/configs; git diff tests/configs/golden
"""

import os
from pathlib import Path

import pytest

from axon.config import load, root_of

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
INCLUDED = {
    "gemma",
    "llama3",
    "tune/chats",
    "tune/hub_lora",
    *(f"models/{path.stem}" for path in (ROOT / "configs" / "models").iterdir()),
}
"""Parts of other files, no runs of their own."""

NAMES = sorted(
    {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in (ROOT / "configs").rglob("*.gin")} - INCLUDED
)

PARAMETERS = {
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "gpt2_small": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "gpt_oss_20b": 20_914_757_184,
    "deepseek_v3": 671_026_404_352 + 11_610_067_968,
}
"""As counted in the published weights. (DeepSeek-V3's: its layers, embedding and head, and the multi-token block
without the copies of the last two that are stored with it; the routers' biases are variables.)"""


def read(path: Path):
    return load(path, root=root_of(path))


def resolved(name: str):
    return read(ROOT / "configs" / f"{name}.gin")


@pytest.mark.parametrize("name", NAMES)
def test_the_resolved_configuration_is_golden(name):
    file = GOLDEN / f"{name}.gin"
    text = resolved(name).text
    if os.environ.get("AXON_REWRITE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), "if the change is meant, rewrite it: see the top of this file"


def test_no_golden_text_is_left_over():
    assert sorted(str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.gin")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_text_builds_the_same_tree(name):
    assert read(GOLDEN / f"{name}.gin").tree == resolved(name).tree


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_model_has_as_many_parameters_as_the_published_one(name):
    import math

    from axon.nn import parameters

    specs = parameters(resolved(name).tree.model.build())
    assert sum(math.prod(spec.shape) for spec in specs.values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_file_opens_with_what_it_needs(name):
    header = (ROOT / "configs" / f"{name}.gin").read_text().partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in header)
    assert any("needs" in line.lower() for line in header)
