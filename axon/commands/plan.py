"""`axon plan`: layouts for a model on a machine, the fastest first, with memory, time and reasons."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from axon.commands.paths import path
from axon.errors import UserError
from axon.plan.predict.failures import Failures

TOP = 5


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
    top: Annotated[int | None, typer.Option(min=1, help=f"How many plans; by default {TOP}.")] = None,
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
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Compile each for the target; what does not fit is dropped, the next is tried."),
    ] = False,
    links: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.json", help="Bandwidths as measured, instead of the table's."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST..LAST",
            help="Instead, weak and strong scaling over numbers of devices, as 64..16384, in slices or hosts as --on.",
        ),
    ] = None,
    mtbf: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Of --scale: hours between a device's failures; {Failures.mtbf / 3600:.0f} by default."
        ),
    ] = None,
    restart: Annotated[
        int | None,
        typer.Option(min=0, help=f"Of --scale: seconds until a run trains again; by default {Failures.restart:.0f}."),
    ] = None,
    save: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of --scale: seconds that a checkpoint takes; by default {Failures.save:.0f}."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Choose mesh, ZeRO stage, schedule, microbatches and remat for a machine that need not be here, with reasons.

    Seconds and memory are predicted (docs/planner.md); --compile asks the target's compiler too.

    Example: `axon plan configs/llama3_405b.gin --on v5p:16x16x16 --write my.gin`, then `axon train my.gin`
    """
    from axon.show.plan import plans_json, print_plans, write_plan
    from axon.show.plan_picture import draw_plans
    from axon.show.planning import plan_config

    sizes = {"Data.batch": global_batch, "Data.seq": seq}
    changes = [*set_, *(f"{name}={size}" for name, size in sizes.items() if size is not None)]
    say = partial(typer.echo, err=True)
    told = {"mtbf": mtbf and 3600.0 * mtbf, "restart": restart, "save": save}
    failures = {name: seconds for name, seconds in told.items() if seconds is not None}
    if scale is not None:
        if write is not None or compile_ or top is not None:
            raise UserError("--scale has the best plan of each machine; leave out --write, --compile and --top")
        _scale(config, on, changes, pin, scale, Failures(**failures), say, links, draw, json_)
        return
    if failures:
        raise UserError(f"--{next(iter(failures))} is for --scale FIRST..LAST: add that, or leave it out")
    found = plan_config(config, on, changes, pin, top or TOP, say if compile_ else None, links)
    if write is not None:
        write_plan(found, config, changes, write)
    if draw is not None:
        draw_plans(found.plans, found.target.chip.memory, f"{config} on {found.target.name}, predicted", draw)
    if json_:
        typer.echo(json.dumps(plans_json(found)))
    else:
        print_plans(found)


def _scale(
    config: Path,
    on: str,
    changes: list[str],
    pins: list[str],
    sizes: str,
    failures: Failures,
    say: Callable[[str], None],
    links: Path | None,
    draw: Path | None,
    as_json: bool,
) -> None:
    from axon.show.scaling import print_scaling, scale_config, scaling_json
    from axon.show.scaling_picture import draw_scaling

    found = scale_config(config, on, changes, pins, sizes, failures, say, links)
    title = f"{config} on machines as {on}"
    if draw is not None:
        draw_scaling(found, f"{title}, predicted", draw)
    if as_json:
        typer.echo(json.dumps(scaling_json(found, config)))
    else:
        print_scaling(found, title)
