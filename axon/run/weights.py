"""Restoring a trained model in the dtype in which a runtime stores its weights."""

from typing import Any

from axon.run.trained import Report, Trained
from axon.runtime import Runtime


def restore_as_stored(trained: Trained, runtime: Runtime, report: Report, larger: Any = None) -> tuple[Any, Any]:
    """Parameters and variables of a trained model for a runtime of it, which may have matrices in 8 bits; `larger`: the
    runtime's model, where that has more of what is stored than the run's.

    These are quantised on the devices: of a model of the hub one is read after the other, a run's are all restored
    before.
    """
    model = trained.train.model
    if not runtime.operands:
        return trained.restore(runtime, model, report)
    report(f"weights: {runtime.choices['weights']}")
    wide = Runtime(
        larger or model,
        runtime.layout,
        precision=runtime.precision,
        placement=runtime.placement,
        weights=runtime.compute_dtype,
    )
    return trained.restore(wide, model, report, runtime.derived)
