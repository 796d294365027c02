"""`axon tune --inspect` shows examples as they are, what is learned in colour."""

import json
from dataclasses import replace

import pytest
import typer

from axon.commands.examples import show_examples
from axon.data import Bpe, JsonLines
from axon.errors import UserError
from axon.tune import Chats, Comparisons, Words


def test_what_is_learned_is_in_colour_and_the_text_is_whole(tiny, caches, capsys):
    data = Chats(48, 8, (Words(count=30),), Bpe(vocab=257))
    show_examples(replace(tiny, data=data), 2)
    shown = capsys.readouterr().out
    for number, (_, record) in zip(range(2), Words(count=30).records(), strict=False):
        text = f"<|endoftext|>user: {record['prompt']}\nassistant:"
        assert text + typer.style(f" {record['completion']}\n<|endoftext|>", fg="green") in shown, number


def test_of_a_pair_both_texts_are_shown_as_they_are(tiny, caches, capsys):
    data = Comparisons(96, 8, (Words(count=30, pairs=True),), Bpe(vocab=257), held_out=0.0)
    show_examples(replace(tiny, data=data, evaluation=None), 1)
    shown = capsys.readouterr().out
    _, record = next(Words(count=30, pairs=True).records())
    for side in ("chosen", "rejected"):
        answer = typer.style(f" {record[side]}\n<|endoftext|>", fg="green")
        assert f"<|endoftext|>user: {record['prompt']}\nassistant:{answer}\n" in shown


def test_a_page_has_the_same_texts_escaped_and_marked_by_weight(tiny, caches, capsys, tmp_path):
    talk = [{"role": "user", "content": "1 < 2?"}, {"role": "assistant", "content": "<b>yes", "weights": [[3, 6, 0.5]]}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    data = Chats(96, 8, (JsonLines(str(tmp_path / "x.jsonl")),), Bpe(vocab=257), held_out=0.0)
    show_examples(replace(tiny, data=data, evaluation=None), 3, tmp_path / "page.html")
    assert capsys.readouterr().out.splitlines()[-1] == f"1 examples in {tmp_path / 'page.html'}"
    page = (tmp_path / "page.html").read_text()
    mark = '<mark class="learned">'
    assert "user: 1 &lt; 2?\nassistant:" + f"{mark} &lt;b&gt;</mark>{mark}yes</mark><small>×0.5</small>{mark}\n" in page
    assert "<b>yes" not in page
    assert f"{tmp_path / 'x.jsonl'}:1" in page


def test_a_run_on_text_has_no_examples(tiny):
    with pytest.raises(UserError, match=r"--inspect: Train.data is a Data; expected .*@Chats"):
        show_examples(tiny, 2)
