"""docs/tuning.md: its configuration of ten lines is the run that Python builds."""

import re
from pathlib import Path

from axon.config import load
from axon.data import JsonLines
from axon.nn.lora import LoRA
from axon.run import Evaluation, Hub, HubTokenizer, Train
from axon.train.optimizers import AdamW, Constant
from axon.tune import Chats

ROOT = Path(__file__).parents[2]


def test_ten_lines_name_a_model_of_the_hub_and_a_file_of_chats(hub, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "tuning.md").read_text()
    (text,) = re.findall(r"^```\n# mine\.gin\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 10
    for name, target in (("configs", ROOT / "configs"), ("hub", hub)):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "mine.gin").write_text(text)
    (tmp_path / "chats.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert load("mine.gin").tree == Train(
        model=Hub("hf:hub"),
        init_from="hf:hub",
        transforms=(LoRA(),),
        data=Chats(sources=(JsonLines("chats.jsonl"),), tokenizer=HubTokenizer("hf:hub"), seq=128, batch=8),
        optimizer=AdamW(Constant(3e-3)),
        evaluation=Evaluation(every=30, answers=15),
        steps=60,
    )
