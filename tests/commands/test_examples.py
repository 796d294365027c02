"""`axon tune --inspect` shows examples as they are, what is learned in colour."""

from dataclasses import replace

import pytest
import typer

from axon.commands.examples import show_examples
from axon.data import Bpe
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


def test_a_run_on_text_has_no_examples(tiny):
    with pytest.raises(UserError, match=r"--inspect: Train.data is a Data; expected .*@Chats"):
        show_examples(tiny, 2)
