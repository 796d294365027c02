"""`axon show`: the configuration as it was read, where parameters live, a pipeline's schedule, what a step sends."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from axon.config import load, root_of
from axon.errors import UserError
from axon.kernels.choice import check_names
from axon.layout import KINDS, ParameterRow, Placement, explain
from axon.plan.memory import FROZEN, IN_FLIGHT, gradients
from axon.plan.topology import devices
from axon.run import Serve, Train, placed, program, serving_program
from axon.runtime import IDENTITY_LAYERS
from axon.serve.program import ServingProgram
from axon.show.draw import draw
from axon.show.schedule import draw_schedule, print_schedule
from axon.show.serving import print_engines, serving_totals
from axon.show.traffic import print_traffic
from axon.train.optimizers import schedule_notices
from axon.train.step import Program


def show_config(
    path: Path,
    overrides: Sequence[str],
    plan: Path | None = None,
    on: str | None = None,
    picture: Path | None = None,
    weight: str | None = None,
) -> None:
    """Print it all. Raises `ConfigError` and `LayoutError` as a run would; needs none of the mesh's devices.

    Of a file of `configs/serve`, instead of what training sends and keeps, its engines and their cache.

    Args:
        plan: a file that is laid over it. on: a topology (see `axon.plan.topology.devices`) for whose devices the step
            is traced; this machine's platform by default. picture: a file to draw the mesh into, with the shards of
            `weight`, a parameter's path; the largest by default. A pipeline's schedule is drawn into a second file,
            `FILE-schedule.png`.
    """
    if weight is not None and picture is None:
        raise UserError("--weight says what to draw: give --draw FILE.png too")
    resolved = load(path, overrides, plan=plan, root=root_of(path, overrides))
    tree: Train | Serve = resolved.tree
    placement = _placement(tree, on)
    if on is None:  # no chip, and so none of the kernels that a configuration asks for by name
        check_names(tree.execution.kernels)
        tree = replace(tree, execution=replace(tree.execution, kernels={}))
    # Raises for a layout that cannot hold the model.
    compiled = serving_program(tree, placement) if isinstance(tree, Serve) else program(tree, placement)
    specs = compiled.parameters
    console = Console(width=None if Console().is_terminal else 160)
    console.print("\n".join(resolved.lines), markup=False, highlight=False, soft_wrap=True)
    rows = list(explain(placement, specs))
    totals = serving_totals(compiled) if isinstance(compiled, ServingProgram) else _totals(compiled)
    console.print(_mesh(placement), _table(rows), totals, sep="\n")
    console.print(_replicated(rows), soft_wrap=True)
    if isinstance(compiled, ServingProgram):
        print_engines(console, compiled)
        _draw_mesh(console, placement, specs, picture, weight)
        return
    if IDENTITY_LAYERS in compiled.choices:
        console.print(compiled.choices[IDENTITY_LAYERS], soft_wrap=True)
    assert isinstance(tree, Train)
    for line in schedule_notices(tree.optimizer, tree.steps):
        console.print(line, markup=False, soft_wrap=True)
    print_schedule(console, tree, compiled)
    _draw_mesh(console, placement, specs, picture, weight)
    if picture is not None and (schedule := draw_schedule(compiled, picture)):
        console.print(f"the pipeline's schedule is drawn into {schedule}", markup=False, soft_wrap=True)
    print_traffic(console, compiled)


def _draw_mesh(console: Console, placement: Placement, specs: Any, picture: Path | None, weight: str | None) -> None:
    if picture is not None:
        draw(placement, specs, picture, weight)
        console.print(f"the mesh and a weight on it are drawn into {picture}", markup=False, soft_wrap=True)


def _placement(tree: Train | Serve, on: str | None) -> Placement:
    if on is not None:
        return placed(tree, devices(on))
    return Placement.described(tree.layout, jax.device_count(), jax.default_backend())


def _mesh(placement: Placement) -> Table:
    table = Table(title=f"mesh of {placement.mesh.size} devices", title_justify="left", box=None)
    for heading in ("mesh axis", "size", *KINDS):
        table.add_column(heading)
    for axis, size in placement.mesh.shape.items():
        splits = [" ".join(n for n, row in placement.tables[kind].items() if axis in row) for kind in KINDS]
        table.add_row(axis, str(size), *splits)
    return table


def _table(rows: Sequence[ParameterRow]) -> Table:
    table = Table(title="parameters", title_justify="left", box=None)
    for heading in ("path", "axes", "shape", "mesh axes"):
        table.add_column(heading)
    table.add_column("bytes per device", justify="right")
    for row in rows:
        split = " ".join("·".join(axes) or "–" for axes in row.split)
        shape = " × ".join(map(str, row.shape))
        table.add_row(row.path, " ".join(row.axes), shape, split, f"{row.bytes_per_device:,}")
    return table


def _totals(compiled: Program) -> Table:
    """What training keeps from step to step, and the gradients in between."""
    placement, state = compiled.placement, compiled.specs
    parts = {
        "params": state.parameters,
        "grads": gradients(compiled),
        "optimizer": state.optimizer,
        "variables": state.variables,
    }
    parts |= {IN_FLIGHT: state.in_flight, FROZEN: compiled.references.specs}
    elsewhere = {"bytes on the host for each": placement.on_host} if placement.host else {}
    elsewhere |= {"bytes on disk for each": placement.on_disk} if placement.disk else {}
    table = Table(title="totals", title_justify="left", box=None)
    for heading in ("kind", "bytes in all", "bytes per device", *elsewhere):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, tree in parts.items():
        if specs := jax.tree.leaves(tree):
            apart = [
                [s for s in specs if kind != FROZEN and is_there(s.axes, s.kind)] for is_there in elsewhere.values()
            ]
            sizes = [sum(map(placement.bytes_per_device, stored)) for stored in (specs, *apart)]
            on_device = sizes[0] - sum(sizes[1:])
            sizes = [sum(spec.nbytes for spec in specs), on_device, *sizes[1:]]
            table.add_row(kind, *(f"{size:,}" for size in sizes))
    return table


def _replicated(rows: Sequence[ParameterRow]) -> str:
    paths = [row.path for row in rows if row.replicated]
    return f"replicated on every device: {', '.join(paths)}" if paths else "no parameter is replicated on every device"
