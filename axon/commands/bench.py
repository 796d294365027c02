"""`axon bench`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from axon.commands.options import Json
from axon.commands.paths import path
from axon.disk import output, writing
from axon.errors import UserError


def bench(
    name: Annotated[
        str,
        typer.Argument(help="train, overhead, data, compile, checkpoint, import, serve, plan, collectives, kernels."),
    ],
    json_: Json = False,
    static: Annotated[bool, typer.Option("--static", help="Of kernels: cost by formula; nothing runs.")] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Of kernels: compile for TPUs and H200s, record what the compilers say.")
    ] = False,
    bundles: Annotated[
        bool, typer.Option("--bundles", help="Of kernels: VLIW bundles of what each does most; nothing runs.")
    ] = False,
    search: Annotated[bool, typer.Option("--search", help="Of kernels: find attention's tiles on this TPU.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.json", help="Of collectives: links, for `axon plan --links`."),
    ] = None,
) -> None:
    """Run a benchmark: `train` (against torch), `overhead` (against bare JAX), `data`, `compile`, `checkpoint`,
    `import`, `serve`, `plan`, `collectives`, `kernels`.

    Example: `axon bench train --json`
    """
    _find_benchmarks(Path(__file__).parents[2])
    from scripts import bench

    if (static or compile_ or bundles or search) and name != "kernels":
        only = "--static, --compile, --bundles and --search are for `axon bench kernels` only"
        raise UserError(f"axon bench {name}: {only}")
    if out is not None and name != "collectives":
        raise UserError(f"axon bench {name}: --out is for `axon bench collectives` only")
    if out is not None:
        out = output(out, "--out", ".json")
    if search:
        from scripts.bench.tiles import search_here

        typer.echo(search_here())
        return
    if static or compile_ or bundles:
        _kernels_compiled(compile_, bundles, json_)
        return
    result = bench.run(name)
    import jax

    if jax.process_index() > 0:
        return
    if out is not None:
        with writing(out):
            out.write_text(json.dumps(result["links"], indent=2) + "\n", encoding="utf-8")
    if json_:
        typer.echo(json.dumps(result))
    else:
        bench.show(name, result)


def _find_benchmarks(root: Path) -> None:
    """Make `scripts.bench`, beside the package in a clone, importable. Raises `UserError` where it is not there."""
    folder = root / "scripts" / "bench"
    if not folder.is_dir():
        repository = "benchmarks are in the repository, not in the installed package"
        raise UserError(f"axon bench: no folder {folder}: {repository}. In a clone of it: pip install -e .")
    sys.path.insert(0, str(root))


def _kernels_compiled(again: bool, bundles: bool, as_json: bool) -> None:
    from scripts.bench import bundles as counted
    from scripts.bench import kernel_costs, ptxas

    if again:
        kernel_costs.record()
        counted.record()
        ptxas.record()
    shown = counted if bundles else kernel_costs
    rows = shown.rows()
    for line in [json.dumps(rows)] if as_json else shown.lines(rows):
        typer.echo(line)
