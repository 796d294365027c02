"""`axon generate`: what a trained model makes of a prompt, or of many."""

from pathlib import Path
from typing import Annotated

import typer

from axon.commands.options import Adapter, Weights
from axon.commands.paths import RunDir, path
from axon.errors import UserError


def generate(
    run_dir: RunDir,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, or to answer.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="Instead, many: a .txt file of a prompt a line, or a .jsonl file of objects with a prompt and, where "
            "they differ from the options, fields of axon.serve.Sampling.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="OUT.jsonl",
            help="A new file for the texts of --prompts, else printed. Until all are known it is OUT.jsonl.part.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="Divides the logits; 0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set with this probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample tokens with this fraction of the most likely one's probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    weights: Weights = None,
    adapter: Adapter = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, what was there before is less likely.")] = 1.0,
    stop: Annotated[
        list[str], typer.Option(metavar="TEXT", help="Ends a text, and is left out; may be given several times.")
    ] = [],  # noqa: B006 - typer reads it, nothing writes it
) -> None:
    """Continue a text with a trained model, or answer it with an encoder–decoder.

    Example: `axon generate runs/quickstart --prompt "def main(" --tokens 200`; many prompts: `--prompts in.txt`
    """
    if (prompt is None) == (prompts is None):
        raise UserError("give one of --prompt TEXT and --prompts FILE")
    if prompt is not None and out is not None:
        raise UserError("--out is for --prompts; a --prompt's text is printed")

    from axon.run.inspect import generate_text
    from axon.run.prompts import generate_texts
    from axon.serve.request import Sampling

    penalty, stops = repetition_penalty, tuple(stop)
    sampling = Sampling(tokens, temperature, top_k, top_p, min_p, seed, repetition_penalty=penalty, stop=stops)
    if prompt is not None:
        typer.echo(generate_text(run_dir, prompt, sampling, _say, weights, adapter))
    elif prompts is not None:
        generate_texts(run_dir, prompts, sampling, out, _say, weights, adapter)


def _say(line: str) -> None:
    typer.echo(line, err=True)
