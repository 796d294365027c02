"""`axon plan`: layouts for a model on a machine, the fastest first, or engines for requests, with memory, time and
reasons."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from axon.commands.options import Config, Json, Set
from axon.commands.paths import path
from axon.errors import UserError
from axon.plan.predict.failures import Failures
from axon.show.question import Question

TOP = 5

On = Annotated[
    str, typer.Option("--on", metavar="TARGET", help="A machine: v5p:16x16x16, 2*v5e:16x16, h100:2048x8, cpu:8, ….")
]
Pin = Annotated[list[str], typer.Option(metavar="NAME.FIELD=VALUE", help="What each plan must have, as Layout.zero=3.")]
Top = Annotated[int | None, typer.Option(min=1, help=f"How many plans; by default {TOP}.")]
GlobalBatch = Annotated[int | None, typer.Option(min=1, help="Sequences of a step: Data.batch.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Positions of a sequence: Data.seq.")]
Write = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="FILE.gin", help="Write the best here, for --plan of axon train and others."),
]
Draw = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="FILE.png", help="Draw what each plan's memory and step are made of."),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile each for the target; what does not fit is dropped, the next is tried."),
]
Links = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="FILE.json", help="Bandwidths as measured, instead of the table's."),
]
Format = Annotated[
    list[str],
    typer.Option(
        "--format",
        metavar="RECIPE",
        help="Formats of products to try: FP8Current, Int8, … or none; of a model that is served, of its weights: "
        "bfloat16, int8, …. May be given several times.",
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST..LAST",
        help="Instead, weak and strong scaling over numbers of devices, as 64..16384, in slices or hosts as --on.",
    ),
]
Mtbf = Annotated[
    int | None,
    typer.Option(min=1, help=f"Of --scale: hours between a device's failures; {Failures.mtbf / 3600:.0f} by default."),
]
Restart = Annotated[
    int | None,
    typer.Option(min=0, help=f"Of --scale: seconds until a run trains again; by default {Failures.restart:.0f}."),
]
Save = Annotated[
    int | None,
    typer.Option(min=1, help="Of --scale: seconds of a checkpoint; by default those of its state to the host."),
]

Traffic = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="FILE.json",
        help="Of a model that is served: requests_per_second, prompt_tokens, answer_tokens, ttft_ms and tpot_ms.",
    ),
]

say = partial(typer.echo, err=True)


def plan(
    config: Config,
    on: On,
    set_: Set = [],  # noqa: B006 - typer reads it, nothing writes it
    pin: Pin = [],  # noqa: B006
    format_: Format = [],  # noqa: B006
    top: Top = None,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    write: Write = None,
    draw: Draw = None,
    compile_: Compile = False,
    links: Links = None,
    scale: Scale = None,
    mtbf: Mtbf = None,
    restart: Restart = None,
    save: Save = None,
    traffic: Traffic = None,
    json_: Json = False,
) -> None:
    """Choose mesh, ZeRO stage, schedule, microbatches and remat for a machine that need not be here, with reasons.

    Seconds and memory are predicted (docs/planner.md); --compile asks the target's compiler too.

    Example: `axon plan configs/llama3_405b.gin --on v5p:16x16x16 --write my.gin`, then `axon train
    configs/llama3_405b.gin --plan my.gin`
    """
    sizes = {"Data.batch": global_batch, "Data.seq": seq}
    changes = (*set_, *(f"{name}={size}" for name, size in sizes.items() if size is not None))
    question = Question(config, on, changes, tuple(pin), links, tuple(format_))
    failures = _failures(mtbf, restart, save)
    if _serves(question, traffic):
        of_training = {"pin": pin, "global-batch": global_batch, "seq": seq, "draw": draw, "compile": compile_}
        _check_unused({**of_training, "scale": scale, **failures})
        assert traffic is not None
        _plan_serving(question, traffic, top or TOP, write, json_)
        return
    if scale is not None:
        if write is not None or compile_ or top is not None or format_:
            raise UserError(
                "--scale has the best plan of each machine; leave out --write, --compile, --top and --format"
            )
        _scale(question, scale, Failures(**failures), draw, json_)
        return
    if failures:
        raise UserError(f"--{next(iter(failures))} is for --scale FIRST..LAST: add that, or leave it out")
    _plan(question, top or TOP, say if compile_ else None, write, draw, json_)


def _serves(question: Question, traffic: Path | None) -> bool:
    """Whether the config serves a model. Raises `UserError` where `traffic` does not go with it."""
    from axon.config import root_of

    serves = root_of(question.config, question.overrides) == "Serve"
    if serves and traffic is None:
        raise UserError(
            f"{question.config} serves a model: say for which requests, as --traffic FILE.json (docs/planner.md)"
        )
    if traffic is not None and not serves:
        raise UserError(
            f"--traffic is for a config that serves a model, and {question.config} trains one: leave it out"
        )
    return serves


def _check_unused(of_training: Mapping[str, Any]) -> None:
    if name := next((name for name, value in of_training.items() if value), None):
        raise UserError(f"--{name} is for a config that trains, and this one serves a model: leave it out")


def _plan_serving(question: Question, traffic: Path, count: int, write: Path | None, as_json: bool) -> None:
    from axon.show.serving_plan import plan_serving, print_serving_plans, serving_plans_json, write_serving_plan

    found = plan_serving(question, traffic, count)
    if write is not None:
        write_serving_plan(found, write)
    if as_json:
        typer.echo(json.dumps(serving_plans_json(found)))
    else:
        print_serving_plans(found)


def _failures(mtbf: int | None, restart: int | None, save: int | None) -> dict[str, float]:
    """The fields of `Failures` that were given, in seconds."""
    options = {"mtbf": mtbf and 3600.0 * mtbf, "restart": restart, "save": save}
    return {name: seconds for name, seconds in options.items() if seconds is not None}


def _plan(
    question: Question,
    count: int,
    compiling: Callable[[str], None] | None,
    write: Path | None,
    draw: Path | None,
    as_json: bool,
) -> None:
    from axon.show.plan import plans_json, print_plans, write_plan
    from axon.show.plan_picture import draw_plans
    from axon.show.planning import plan_config

    found = plan_config(question, count, compiling)
    if write is not None:
        write_plan(found, write)
    if draw is not None:
        draw_plans(found, draw)
    if as_json:
        typer.echo(json.dumps(plans_json(found)))
    else:
        print_plans(found)


def _scale(question: Question, sizes: str, failures: Failures, draw: Path | None, as_json: bool) -> None:
    from axon.show.scaling import print_scaling, scale_config, scaling_json
    from axon.show.scaling_picture import draw_scaling

    found = scale_config(question, sizes, failures, say)
    title = f"{question.config} on machines as {question.on}"
    if draw is not None:
        draw_scaling(found, f"{title}, predicted", draw)
    if as_json:
        typer.echo(json.dumps(scaling_json(found, question.config)))
    else:
        print_scaling(found, title)
