"""Why a plan lost, in one sentence."""

from axon.plan.predict.memory import GIB
from axon.plan.search.plans import Plan


def why_not(plan: Plan, best: Plan) -> str:
    """What makes `plan` slower than `best`: the line of its step that grew most, or else its memory."""
    longer = plan.seconds.total - best.seconds.total
    name, more = max(_growth(plan, best).items(), key=lambda one: one[1])
    if longer <= 0 or more <= 0:
        extra = (plan.memory.total - best.memory.total) / GIB
        return f"as fast, and it takes {extra:.2f} GiB more of each device"
    line = next(line for line in plan.seconds.lines if line.name == name)
    along = f" along {' × '.join(map(repr, line.mesh_axes))}" if line.mesh_axes else ""
    share = longer / best.seconds.total
    own = "which the best does not have" if more >= 0.999 * line.exposed else f"{more:.3g} s more than in the best"
    return f"{longer:.3g} s slower ({share:.1%}): {name}{along}, {line.exposed:.3g} s, {own}"


def _growth(plan: Plan, best: Plan) -> dict[str, float]:
    """Line → by how many seconds a step is longer for it than in the best plan."""
    return {line.name: line.exposed - best.seconds.of(line.name) for line in plan.seconds.lines}
