"""`axon plan`: layouts for a model on a machine, the fastest first, with memory, time and reasons."""

import json
from pathlib import Path
from typing import Annotated

import typer

from axon.commands.paths import path


def plan(
    config: Annotated[Path, typer.Argument(parser=path, metavar="CONFIG", help="A .gin file.")],
    on: Annotated[
        str,
        typer.Option("--on", metavar="TARGET", help="A machine: v5p:16x16x16, 2*v5e:16x16, h100:2048x8, h200:8, …."),
    ],
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME.FIELD=VALUE", help="Bind a value last, as a line of the file would."),
    ] = [],  # noqa: B006 - typer reads it, nothing writes it
    pin: Annotated[
        list[str],
        typer.Option("--pin", metavar="NAME.FIELD=VALUE", help="What each plan must have, as Layout.zero=3."),
    ] = [],  # noqa: B006
    top: Annotated[int, typer.Option(min=1, help="How many plans.")] = 5,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step: Data.batch.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Positions of a sequence: Data.seq.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.gin", help="Write the best here: a config that includes CONFIG."),
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.png", help="Draw what each plan's memory and step are made of."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Choose mesh, ZeRO stage, schedule, microbatches and remat for a machine that need not be here, with reasons.

    Nothing is compiled: seconds and memory are predicted (docs/planner.md). `axon compile` checks a plan.

    Example: `axon plan configs/llama3_405b.gin --on v5p:16x16x16 --write my.gin`, then `axon train my.gin`
    """
    from axon.show.plan import plan_config, print_plans, write_plan
    from axon.show.plan_picture import draw_plans

    sizes = {"Data.batch": global_batch, "Data.seq": seq}
    changes = [*set_, *(f"{name}={size}" for name, size in sizes.items() if size is not None)]
    found = plan_config(config, on, changes, pin, top)
    if write is not None:
        write_plan(found, config, changes, write)
    if draw is not None:
        draw_plans(found.plans, found.target.chip.memory, f"{config} on {found.target.name}, predicted", draw)
    if json_:
        typer.echo(json.dumps(found.json()))
    else:
        print_plans(found)
