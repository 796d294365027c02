"""`axon report`: where the time of a run went, and the run as one HTML page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from axon.commands.paths import path
from axon.disk import output


def report(
    run_dir: Annotated[
        Path, typer.Argument(parser=path, metavar="RUN_DIR", help="The folder of a run, finished or not.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.html", help="Where to write the page; RUN_DIR/report.html by default."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; no page unless --html.")] = False,
) -> None:
    """Where a run's time went (its goodput), and one HTML page with its plots, events and configuration.

    Example: `axon report runs/quickstart`
    """
    from axon.run.reporting import RunReport

    target = output(html, "--html", ".html", ".htm") if html is not None else run_dir / "report.html"
    found = RunReport(run_dir)
    for line in [json.dumps(found.summary())] if json_ else found.lines():
        typer.echo(line)
    if html is not None or not json_:
        found.write_page(target)
        typer.echo(f"page: {html or target}", err=json_)
