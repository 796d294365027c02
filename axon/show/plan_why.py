"""Why a plan reaches the MFU that it does: from the chips' peak to it, line by line, by the names of axes."""

from collections.abc import Iterator

from axon.chips.target import Target
from axon.plan.predict.seconds import HEAD, PRODUCTS, Line
from axon.plan.search import Plan

LEAST = 1e-3
"""The share of a step from which on a line is told."""


def why(plan: Plan, target: Target) -> Iterator[str]:
    """Sentences: how long the model's own FLOPs would take at the peak, what products take, and what each other line
    adds, the longest first, with the MFU that is left; then what is hidden."""
    total = plan.seconds.total
    ideal = plan.seconds.mfu * total
    so_far = plan.seconds.of(PRODUCTS, HEAD)
    peak = f"{target.chip.peak / 1e12:,.0f} TFLOP/s × {target.devices:,}"
    yield f"why {plan.seconds.mfu:.1%}: at the peak, {peak}, the model's FLOPs take {ideal:.3g} s: 100 %"
    yield f"{PRODUCTS}, {HEAD}, at the rates of products and kernels: {so_far:.3g} s: {ideal / so_far:.1%}"
    others = (line for line in plan.seconds.lines if line.name not in (PRODUCTS, HEAD))
    for line in sorted(others, key=lambda line: -line.exposed):
        if line.exposed >= LEAST * total:
            so_far += line.exposed
            yield f"{_name(line, plan)}: {line.exposed:.3g} s{_made_of(line)}: {ideal / so_far:.1%}"
    for line in plan.seconds.lines:
        if line.hidden >= LEAST * total:
            yield f"hidden behind {line.behind}: {line.hidden:.3g} s of {_name(line, plan)}{_made_of(line)}"


def _name(line: Line, plan: Plan) -> str:
    """With its mesh axes, their sizes, and the axes that these split."""
    mesh = {axis: plan.layout.mesh[axis] for axis in line.mesh_axes if axis in plan.layout.mesh}
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    splits = f", which splits {', '.join(line.axes)}" if line.axes else ""
    return f"{line.name} along {sizes}{splits}" if mesh else line.name


def _made_of(line: Line) -> str:
    parts = [f"{line.bytes / 1e9:.3g} GB a device"] if line.bytes else []
    parts += [line.algorithm] if line.algorithm else []
    parts += [f"{line.latency / line.seconds:.0%} latency"] if line.latency >= 0.005 * line.seconds else []
    return f" ({', '.join(parts)})" if parts else ""
