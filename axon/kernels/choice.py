"""Which implementation of an operation runs: the first that supports it, or the one requested by name."""

from collections.abc import Callable, Mapping

from axon.axes import current, execution, log_choice, platform
from axon.chips import chip_of
from axon.errors import UserError, suggest

OPERATIONS = {
    "attention": ("tpu", "mosaic", "cudnn", "xla", "reference"),
    "paged_attention": ("tpu", "mosaic", "xla", "reference"),
    "cross_entropy": ("xla",),
    "grouped_matmul": ("tpu", "mosaic", "xla", "reference"),
    "quantized_matmul": ("tpu", "mosaic", "xla", "reference"),
    "quantize": ("tpu", "xla"),
    "sampling": ("tpu", "xla", "reference"),
}
"""Each operation's implementations, on any platform."""


def check_names(requested: Mapping[str, str]) -> None:
    """Raises `UserError` for an unknown operation, and for an implementation that it has on no platform."""
    for operation, name in requested.items():
        if operation not in OPERATIONS:
            raise UserError(f"Execution.kernels: unknown operation {operation!r}.{suggest(operation, OPERATIONS)}")
        if name not in (names := OPERATIONS[operation]):
            raise UserError(f"Execution.kernels: {operation} has no implementation {name!r}.{suggest(name, names)}")


def with_tpu(unsupported: str | None, others: Mapping[str, str | None]) -> dict[str, str | None]:
    """`others`, and the Pallas kernel for TPUs with why it cannot run: `unsupported`, or the program's platform.

    The kernel is first, so that the choice of another is logged with the reason; last on a CPU, where the reason is
    obvious.
    """
    target = platform()
    if target == "tpu":
        return {"tpu": unsupported, **others}
    elsewhere = {"tpu": f"this program is for a {target}"}
    return {**others, **elsewhere} if target == "cpu" else {**elsewhere, **others}


def with_gpu(kernels: Mapping[str, str | None], others: Mapping[str, str | None]) -> dict[str, str | None]:
    """`others`, and the kernels for GPUs, each with why it cannot run: the platform's name anywhere else.

    On a GPU they are first, elsewhere last.
    """
    target = platform()
    if target == "gpu":
        return {**kernels, **others}
    return {**others, **dict.fromkeys(kernels, f"this program is for a {target}")}


def off_gpu(unsupported: Callable[[str], str | None]) -> str | None:
    """Why a kernel for GPUs cannot run: the platform's name anywhere else, and there `unsupported(chip)`."""
    scope = current()
    if scope is None or platform() != "gpu":
        return f"this program is for a {platform()}"
    return unsupported(scope.placement.chip)


def cores() -> int:
    """How many cores a device has, between which a kernel's parallel grid is divided."""
    scope = current()
    chip = None if scope is None else chip_of(scope.placement.chip)
    return 1 if chip is None else chip.cores


def choose(operation: str, candidates: Mapping[str, str | None], detail: str = "") -> str:
    """As `fitting`; logged once, with `detail`, a description of the problem."""
    chosen, why = fitting(operation, candidates)
    log_choice(operation, ", ".join(filter(None, (chosen, detail))) + (f" ({why})" if why else ""))
    return chosen


def fitting(operation: str, candidates: Mapping[str, str | None]) -> tuple[str, str]:
    """The name of the implementation to run, and why: the reasons against those before it.

    `candidates`: implementation → why it cannot run this, None if it can; the best first.

    One may be requested by name (`Execution.kernels`); then that one runs, or this raises `UserError`.
    """
    assert candidates.keys() <= set(OPERATIONS[operation])
    requested = execution().kernels.get(operation)
    if requested is not None and requested not in candidates:
        raise UserError(
            f"Execution.kernels: {operation} has no implementation {requested!r}.{suggest(requested, candidates)}"
        )
    if requested is not None and (reason := candidates[requested]) is not None:
        raise UserError(f"Execution.kernels: {requested!r} is unavailable for {operation}: {reason}")
    able = [name for name, reason in candidates.items() if reason is None]
    if not able:
        raise UserError(f"{operation}: " + "; ".join(f"{name}: {reason}" for name, reason in candidates.items()))
    chosen = requested or able[0]
    rejected = [f"not {name}: {why}" for name, why in candidates.items() if why is not None]
    return chosen, "requested by name" if requested else "; ".join(rejected[: list(candidates).index(chosen)])
