"""The output of `axon show` on the collectives of a step."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from axon.disk import readable
from axon.layout import roles
from axon.plan.traffic import TransferGroup, step_communication, summary
from axon.train.step import Program

OVERLAPPABLE = (
    "overlappable: share of the matmul FLOPs in the same loop body (or in the program outside of loops) that neither "
    "make what is sent nor wait for it; the mean over bytes. The compiler may run these meanwhile; at 0 % all matmuls "
    "wait. `axon compile --on TARGET` shows what it does overlap."
)

AUTO = (
    "Layout.auto: XLA's partitioner adds collectives that the program does not name; compiling shows which: "
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
    console.print(OVERLAPPABLE, soft_wrap=True)


def _roles(program: Program, mesh: dict[str, int]) -> Table:
    table = Table(title="what each mesh axis carries", title_justify="left", box=None)
    for heading in ("mesh axis", "size", "for"):
        table.add_column(heading)
    purposes = roles(program.placement, program.evaluator.axes_used())
    for axis, size in mesh.items():
        table.add_row(axis, str(size), "; ".join(purposes[axis]) if size > 1 else "–")
    return table


def _table(program: Program, groups: Sequence[TransferGroup]) -> Table:
    platform = program.placement.platform
    compute = program.runtime.compute_dtype.name
    title = f"collectives of a step, traced for {platform}, which computes in {compute}"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("mesh axis", "kind", "times", "each device sends", "what", "of", "overlappable"):
        number = heading in ("times", "each device sends", "overlappable")
        table.add_column(heading, justify="right" if number else "left")
    for before, group in zip([None, *groups], groups, strict=False):
        again = before is not None and before.mesh_axes == group.mesh_axes
        axis = "" if again else "·".join(group.mesh_axes)
        parts = ", ".join(group.parts) or "–"
        sent, share = readable(group.bytes), f"{group.overlappable:.0%}"
        table.add_row(axis, group.kind, f"{group.times:,} ×", sent, group.content, parts, share)
    for axes in dict.fromkeys(group.mesh_axes for group in groups):
        same = [group for group in groups if group.mesh_axes == axes]
        times, sent = sum(group.times for group in same), sum(group.bytes for group in same)
        table.add_row("·".join(axes), "all", f"{times:,} ×", readable(sent), "", "", "")
    return table
