"""`axon tune --inspect`: examples as they are trained on."""

from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from axon.data.tokenizer import Tokenizer
from axon.disk import writing
from axon.errors import UserError
from axon.observe.examples_page import ShownExample, examples_page
from axon.tune.examples import Examples
from axon.tune.packing import Document


def show_examples(train: Any, count: int, html: Path | None = None) -> None:
    """Print the first `count` examples of training, what is learned of them in colour; or write them as a page.

    Raises `UserError` for a run on other data."""
    if not isinstance(train.data, Examples):
        raise UserError(f"--inspect: Train.data is a {type(train.data).__name__}; expected examples, as @Chats()")
    prepared = train.data.prepare(typer.echo)
    found = [
        ShownExample(
            train.data.title(one),
            [pieces(train.data.text_of(document), prepared.tokenizer) for document in one.own],
        )
        for one in prepared.splits["train"].examples[:count]
    ]
    if html is None:
        _print(found)
        return
    with writing(html):
        html.write_text(examples_page(Path(train.run_dir or "examples").name, prepared.summary(), found), "utf-8")
    typer.echo(f"{len(found)} examples in {html}")


def _print(examples: list[ShownExample]) -> None:
    for one in examples:
        typer.echo(typer.style(one.title, bold=True))
        for text in one.texts:
            coloured = (typer.style(piece, fg="green") if weight else piece for piece, weight in text)
            typer.echo("".join(coloured), color=True)


def pieces(document: Document, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """An example's text, special tokens shown, in pieces of tokens that count alike."""
    pairs = zip(document.ids.tolist(), document.weights.tolist(), strict=True)
    runs = [(weight, [token for token, _ in run]) for weight, run in groupby(pairs, key=lambda pair: pair[1])]
    return [(tokenizer.decode(ids), weight) for weight, ids in runs]
