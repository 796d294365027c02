"""A measured step beside the predicted one, line by line of the time model (`axon.plan.predict.seconds`)."""

from collections import defaultdict
from dataclasses import dataclass

from axon.plan.predict.seconds import (
    COMMUNICATION,
    ELEMENTWISE,
    HEAD,
    PRODUCTS,
    REPEATED,
    UPDATE,
    UPDATE_PRODUCTS,
    Line,
    Seconds,
)
from axon.plan.profile import roles
from axon.plan.profile.profile import OTHER_PROGRAMS, Row, StepProfile

SENT, IDLE, UNKNOWN_AXES = "sent over", "idle", "unknown mesh axes"
LOSS = "loss"
"""The scope of the head's product with it."""


@dataclass(frozen=True)
class Comparison:
    """One line of a step: seconds of it as traced, and as predicted, None where it is in one of the two only."""

    name: str
    measured: float | None
    predicted: float | None


def beside(profile: StepProfile, predicted: Seconds | None) -> list[Comparison]:
    """All lines of a step, those that take longest first; what is measured adds up to the step.

    Of what is sent, a line for the mesh axes that it runs along: seconds in which no other work runs.
    """
    measured = profile.by(lambda row: line_of(row, profile)) | {IDLE: profile.idle}
    expected: dict[str, float] = defaultdict(float)
    for line in predicted.lines if predicted else ():
        expected[_name(line, profile)] += line.exposed
    found = [Comparison(name, measured.get(name), expected.get(name)) for name in measured | expected]
    return sorted(found, key=lambda one: -max(one.measured or 0.0, one.predicted or 0.0))


def line_of(row: Row, profile: StepProfile) -> str:
    """The line that an operation belongs to."""
    role = row.role
    if role.module in (OTHER_PROGRAMS, roles.UNNAMED) or role.kind == roles.LOOPS:
        return role.kind if role.kind == roles.LOOPS else role.module
    if role.kind == roles.COLLECTIVES:
        return sent_over(() if role.collective is None else role.collective.mesh_axes(profile.mesh))
    if not role.phase:
        return UPDATE
    if LOSS in role.module.split("/"):
        return HEAD
    if role.kind == roles.PRODUCTS or role.kind.startswith(roles.KERNEL):
        return REPEATED if role.phase == "recomputed" else PRODUCTS
    return ELEMENTWISE


def sent_over(mesh_axes: tuple[str, ...]) -> str:
    """The line of what is sent along some mesh axes."""
    return f"{SENT} {', '.join(mesh_axes) or UNKNOWN_AXES}"


def _name(line: Line, profile: StepProfile) -> str:
    """The measured line that a predicted one stands beside."""
    axes = tuple(axis for axis, size in profile.mesh.items() if size > 1 and axis in line.mesh_axes)
    name = UPDATE if line.name == UPDATE_PRODUCTS else line.name
    return sent_over(axes) if axes or line.name in COMMUNICATION else name
