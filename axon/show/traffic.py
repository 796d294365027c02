"""What `axon show` prints of the collectives of a step."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from axon.layout import roles
from axon.plan.traffic import Row, step_communication, summary
from axon.train.step import Program

BESIDE = (
    "beside: share of the matmul FLOPs in the same loop body (or in the program outside of loops) that neither make "
    "what is sent nor wait for it; the mean over bytes. The compiler may run these meanwhile; at 0 % all matmuls wait. "
    "What it does overlap, `axon compile --on TARGET` tells."
)

AUTO = (
    "Layout.auto: XLA's partitioner adds collectives that the program does not name, and only compiling tells which: "
    "`axon compile --on TARGET`. What the program itself names:"
)


def print_traffic(console: Console, program: Program) -> None:
    """What each mesh axis carries, and a step's collectives by mesh axis and kind; traced, not compiled."""
    placement = program.placement
    mesh = dict(placement.mesh.shape)
    console.print(_roles(program, mesh))
    if placement.mesh.size == 1:
        console.print("one device: nothing is sent")
        return
    found = step_communication(program)
    if placement.layout.auto:
        console.print(AUTO, soft_wrap=True)
    console.print(_table(program, summary(found.transfers, list(mesh))))
    for line in found.uncounted:
        console.print(f"not counted: {line}", soft_wrap=True)
    console.print(BESIDE, soft_wrap=True)


def _roles(program: Program, mesh: dict[str, int]) -> Table:
    table = Table(title="what each mesh axis carries", title_justify="left", box=None)
    for heading in ("mesh axis", "size", "for"):
        table.add_column(heading)
    said = roles(program.placement, program.evaluator.axes_used())
    for axis, size in mesh.items():
        table.add_row(axis, str(size), "; ".join(said[axis]) if size > 1 else "–")
    return table


def _table(program: Program, rows: Sequence[Row]) -> Table:
    platform = program.placement.platform
    compute = program.runtime.compute_dtype.name
    title = f"collectives of a step, traced for {platform}, which computes in {compute}"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("mesh axis", "kind", "times", "each device sends", "what", "of", "beside"):
        table.add_column(heading, justify="right" if heading in ("times", "each device sends", "beside") else "left")
    for before, row in zip([None, *rows], rows, strict=False):
        axis = "·".join(row.mesh_axes)
        again = before is not None and before.mesh_axes == row.mesh_axes
        size = readable(row.bytes)
        parts = ", ".join(row.parts) or "–"
        table.add_row(
            "" if again else axis, row.kind, f"{row.times:,} ×", size, row.content, parts, f"{row.beside:.0%}"
        )
    for axes in dict.fromkeys(row.mesh_axes for row in rows):
        same = [row for row in rows if row.mesh_axes == axes]
        table.add_row(
            "·".join(axes), "all", f"{sum(r.times for r in same):,} ×", readable(sum(r.bytes for r in same)), "", "", ""
        )
    return table


def readable(size: float) -> str:
    """Bytes in decimal units: 1.2 GB."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    size /= 1000
    return f"{size:,.3g} TB"
