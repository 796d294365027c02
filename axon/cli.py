"""The command line: thin commands over the same objects that Python code builds."""

import os
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from axon.commands import checkpoint
from axon.commands.bench import bench
from axon.commands.export import export
from axon.commands.generate import generate
from axon.commands.options import Adapter, Config, Json, Planned, Set
from axon.commands.paths import RunDir, path
from axon.commands.plan import plan as plan_command
from axon.commands.profile import profile as profile_command
from axon.commands.report import report
from axon.commands.sample import sample
from axon.commands.serve import serve
from axon.commands.traced import Profile, TakesProfile, steps_of
from axon.disk import cache_folder, location
from axon.errors import UserError
from axon.launch.host import cache_compiled_code, choose_platform, keep_freed_memory
from axon.own_code import at_own_code, in_own_code

app = typer.Typer(
    help="Train language models on named axes. Every command has an example under --help.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

app.add_typer(checkpoint.app, name="checkpoint")

NewRunDir = Annotated[
    str | None,
    typer.Option(
        "--run-dir", metavar="PATH", help="The run's folder, or s3://… or gs://…; runs/NAME-OF-CONFIG by default."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Stop at this step; the schedule stays as it is.")]


@app.command(cls=TakesProfile)
def train(
    config: Config,
    set_: Set = [],  # noqa: B006 - typer reads it, nothing writes it
    plan: Planned = None,
    run_dir: NewRunDir = None,
    steps: Steps = None,
    profile: Profile = None,
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Train in so many processes of this machine.")] = 1,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of their coordinator; by default a free one.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Start again, at most so many times, when a process dies or hangs.")
    ] = 0,
) -> None:
    """Train a model, or continue the run in the folder.

    Example: `axon train configs/quickstart.gin --set "Layout.mesh={'data': 4, 'tensor': 2}"`, or with `--plan my.gin`
    """
    from axon.launch.start import start, supervises

    traced = steps_of(profile)
    if run_dir is not None:
        run_dir = location(run_dir, "--run-dir")
    is_supervisor = supervises(restarts)
    code = None if is_supervisor else start(processes, port)
    if code is not None:
        raise typer.Exit(code)
    keep_freed_memory()

    from axon.run import run
    from axon.run.restarted import run_with_restarts

    tree = _tree(config, set_, plan, run_dir)
    if is_supervisor:
        raise typer.Exit(run_with_restarts(tree, restarts))
    run(tree, steps=steps, profile=traced, report=typer.echo)


def _tree(config: Path, set_: list[str], plan: Path | None, run_dir: str | None) -> Any:
    """The run of a configuration file, with a folder."""
    from dataclasses import replace

    from axon.config import load

    tree = load(config, set_, plan=plan).tree
    return replace(tree, run_dir=str(run_dir or tree.run_dir or Path("runs") / config.stem))


@app.command()
def tune(
    config: Config,
    set_: Set = [],  # noqa: B006
    plan: Planned = None,
    run_dir: NewRunDir = None,
    steps: Steps = None,
    inspect: Annotated[
        int | None, typer.Option(min=1, help="Instead, print so many examples, what is learned of them in colour.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Of --inspect: a page instead of the terminal.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Instead, write the chats with this model's most likely next tokens to --out."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Likeliest tokens that are written of each.")] = 32,
    out: Annotated[Path | None, typer.Option(parser=path, metavar="FILE", help="JSON lines for TaughtChats.")] = None,
) -> None:
    """Tune a model on examples: `axon train`, which has more options, or a look at the examples.

    Example: `axon tune configs/tune/quickstart_sft.gin --inspect 3`
    """
    if (teacher is None) != (out is None):
        raise UserError("--teacher says whose next tokens are written, and --out the file: give both, or neither")
    if teacher is not None and out is not None:
        from axon.run.teach import write_taught

        write_taught(_tree(config, set_, plan, run_dir), teacher, top, out, typer.echo)
        return
    if inspect is None and html is not None:
        raise UserError("--html is the file for what --inspect shows: give that too, as --inspect 20")
    if inspect is None:
        train(config, set_, plan, run_dir, steps)
        return
    from axon.commands.examples import show_examples

    show_examples(_tree(config, set_, plan, run_dir), inspect, html)


@app.command("eval")
def evaluate(
    run_dir: RunDir,
    source: Annotated[
        str | None,
        typer.Option(
            help="Text to evaluate on: stdlib, hf:NAME, a .jsonl, .parquet or text file, or a folder of .txt files."
        ),
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Stop after so many batches.")] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,NAME…", help="Instead, tasks of EleutherAI's lm-eval harness.")
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(parser=path, metavar="DIR", help="Of task files of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Positions of a task's sequences; by default as in training.")
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="Tasks of what the run started from, or the model without --adapter, too.")
    ] = False,
    adapter: Adapter = None,
    json_: Json = False,
) -> None:
    """Loss and bits per byte of a trained model, on its held-out text or on any source; or tasks of lm-eval.

    Example: `axon eval runs/quickstart --source ~/notes`, `axon eval runs/tuned --tasks arc_easy,piqa --before`
    """
    if tasks is not None:
        if source is not None or batches is not None:
            raise UserError("--tasks says what to evaluate on; leave out --source and --batches")
        options = {"folder": task_folder, "limit": limit, "max_length": max_length, "adapter": adapter}
        _evaluate_tasks(run_dir, tasks, json_, before, **options)
        return
    if before or task_folder is not None or limit is not None or max_length is not None:
        raise UserError("--task-folder, --limit, --max-length and --before are for --tasks")
    import json

    from axon.run.inspect import evaluate_run

    found = evaluate_run(run_dir, source, batches, _say, adapter)
    typer.echo(json.dumps(found.metrics() | {"unit": found.unit, "count": found.count}) if json_ else str(found))


def _evaluate_tasks(run_dir: str, names: str, as_json: bool, before: bool, **options: Any) -> None:
    import json

    from axon.run.task_change import change_table, evaluate_before_and_after
    from axon.run.tasks import evaluate_tasks, table

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UserError("--tasks names no task; expected NAME,NAME…, as --tasks arc_easy,piqa")
    found = (evaluate_before_and_after if before else evaluate_tasks)(run_dir, wanted, _say, **options)
    lines = [json.dumps(found)] if as_json else change_table(found["changes"]) if before else table(found["results"])
    for line in lines:
        typer.echo(line)


@app.command()
def show(
    config: Config,
    set_: Set = [],  # noqa: B006
    plan: Planned = None,
    on: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Machine to trace the step for: v5p:4x4x4, h200:8, …")
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE.png",
            help="Draw the mesh, and one weight's shards on it; a pipeline's schedule into FILE-schedule.png.",
        ),
    ] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="PATH", help="The weight to draw; the largest by default.")
    ] = None,
) -> None:
    """The resolved configuration, the mesh, where every parameter lives, and what a step sends over each mesh axis.

    Nothing is compiled, and the mesh's devices need not exist. Of a file of `configs/serve` the cache and the engines.

    Example: `axon show configs/llama3_8b.gin --set "Layout.mesh={'data': 16}" --draw mesh.png`
    """
    from axon.show.show import show_config

    show_config(config, set_, plan, on, draw, weight)


@app.command("compile")
def compile_(
    config: Config,
    on: Annotated[str, typer.Option("--on", metavar="TARGET", help="A topology: v5e:4x4, v5p:4x4x4, h200:8, ….")],
    set_: Set = [],  # noqa: B006
    plan: Planned = None,
    json_: Json = False,
    text: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Write the compiled program (HLO) here.")
    ] = None,
) -> None:
    """Compile the training step for a topology, without its chips: memory, cycles, FLOPs, collectives, kernels.

    Of a file of `configs/serve` the steps of an engine: one in which each request gets a token, and the largest.

    Example: `axon compile configs/pods/llama3_8b_v5e_4x4.gin --on v5e:4x4`
    """
    import json

    from axon.show.compile import compile_config, show_report

    report = compile_config(config, on, set_, plan, text)
    if json_:
        typer.echo(json.dumps(report.json()))
    else:
        show_report(report)


app.command("plan")(plan_command)
app.command("profile")(profile_command)
app.command()(generate)


app.command()(serve)
app.command()(sample)
app.command()(report)
app.command()(export)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="hf:DIR_OR_NAME, or the folder of a run.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new folder for a run, or hf:DIR.")],
    without: Annotated[
        str | None,
        typer.Option(metavar="ADAPTER", help="Leave out an adapter: RUN's own, or hf:ADAPTER, merged in hf:SOURCE."),
    ] = None,
) -> None:
    """A Hugging Face model as the folder of a run, or a run as a Hugging Face model.

    Example: `axon convert hf:Qwen/Qwen3-0.6B runs/qwen3`, and back: `axon convert runs/qwen3 hf:out`; without the
    adapter that is merged in it, `axon convert hf:merged hf:base --without hf:adapter`
    """
    from axon.run.convert import convert

    convert(source, target, _say, without)


app.command()(bench)


def _say(line: str) -> None:
    typer.echo(line, err=True)


OURS = "this is a fault of Axon's, not of yours; please report it with the text above"


def main() -> None:
    """Run a command; exit with 0, 2 (the person's mistake), 1 (ours), 124 (hung), or 130 and 143 (interrupted)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    choose_platform()
    cache_compiled_code(cache_folder() / "xla")
    sys.exit(_exit_code())


def _exit_code() -> int:
    from axon.launch.ending import exit_without_waiting, reports_interrupt, shutdown_gracefully, waits_to_report
    from axon.launch.signals import Interrupted, exit_at_once

    try:
        app()
    except SystemExit as done:
        if in_own_code(done) and not _is_interrupt(done):
            return _failed(done)
        exit_without_waiting(int(done.code or 0))  # typer's own way to end
        raise
    except UserError as error:
        if waits_to_report(error, str(error)):
            typer.echo(f"axon: {error}{at_own_code(error)}", err=True)
        exit_without_waiting(2)
        return 2
    except Interrupted as stop:
        if reports_interrupt():
            typer.echo(f"axon: {stop}", err=True)
        shutdown_gracefully()
        exit_at_once(stop.exit_code)
    except BaseException as error:
        return _failed(error)
    return 0


def _is_interrupt(error: BaseException) -> bool:
    """Whether typer ends with 130 because of Ctrl-C, wherever it came, as in a source of the person's own."""
    before = error.__cause__ or error.__context__
    return isinstance(before, KeyboardInterrupt) or (before is not None and _is_interrupt(before))


def _failed(error: BaseException) -> int:
    """Report what is raised besides messages for the person; the exit code: 2 where it is their own code's."""
    from axon.launch.ending import exit_without_waiting, waits_to_report

    theirs = in_own_code(error)
    if waits_to_report(error, theirs or f"{type(error).__name__}: {error}"):
        if theirs is None or os.environ.get("AXON_TRACEBACK"):
            traceback.print_exc()
        typer.echo(f"axon: {theirs or OURS}", err=True)
    code = 1 if theirs is None else 2
    exit_without_waiting(code)
    return code
