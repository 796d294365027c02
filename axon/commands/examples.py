"""`axon tune --inspect`: examples as they are trained on."""

from itertools import groupby
from typing import Any

import typer

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.tune.examples import Examples
from axon.tune.packing import Document


def show_examples(train: Any, count: int) -> None:
    """Print the first `count` examples of training, what is learned of them in colour.

    Raises `UserError` for a run on other data."""
    if not isinstance(train.data, Examples):
        raise UserError(f"--inspect: Train.data is a {type(train.data).__name__}; expected examples, as @Chats()")
    prepared = train.data.prepare(typer.echo)
    for example in prepared.splits["train"].examples[:count]:
        typer.echo(typer.style(train.data.title(example), bold=True))
        for document in example.own:
            typer.echo(coloured(train.data.text_of(document), prepared.tokenizer), color=True)


def coloured(document: Document, tokenizer: Tokenizer) -> str:
    """An example's text, special tokens shown, what is learned in green."""
    pairs = zip(document.ids.tolist(), document.learned.tolist(), strict=True)
    runs = [(learned, [token for token, _ in run]) for learned, run in groupby(pairs, key=lambda pair: pair[1])]
    return "".join(
        typer.style(tokenizer.decode(ids), fg="green") if learned else tokenizer.decode(ids) for learned, ids in runs
    )
