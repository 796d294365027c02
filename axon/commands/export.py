"""`axon export`: a trained model for those without Axon."""

from pathlib import Path
from typing import Annotated

import typer

from axon.commands.paths import path
from axon.errors import UserError


def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The folder of a run, or hf:DIR_OR_NAME.")],
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="A new folder.")],
    platforms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,…", help="Where it is to run, none of which need be here; cpu,cuda,tpu by default."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 1,
    length: Annotated[int | None, typer.Option(min=1, help="Positions of a sequence; the run's by default.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Instead, a run's LoRA alone, as PEFT saves one.")] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="hf:DIR_OR_NAME", help="The model that it is of; by default where the run began."),
    ] = None,
) -> None:
    """A model as StableHLO, for one device: its forward and its decode step, with its weights and a script to run them.

    Example: `axon export runs/quickstart out --platforms cpu,tpu`, then `python out/run.py 1 2 3`; of a run with LoRA
    `axon export runs/tuned adapter --adapter`
    """
    if base is not None and not adapter:
        raise UserError("--base is for --adapter: it names the model that the adapter is of")
    if adapter and (platforms is not None or batch != 1 or length is not None):
        raise UserError("--platforms, --batch and --length are of programs, which an adapter has not: leave them out")
    if adapter:
        from axon.run.export_adapter import export_adapter

        export_adapter(source, out, base, lambda line: typer.echo(line, err=True))
        return
    from axon.run.export import export_model

    names = [name.strip() for name in (platforms or "cpu,cuda,tpu").split(",") if name.strip()]
    export_model(source, out, names, batch, length, lambda line: typer.echo(line, err=True))
