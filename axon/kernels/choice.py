"""Which implementation of an operation runs: the first that fits, or the one that was asked for by name."""

from collections.abc import Mapping

from axon.axes import current, log_choice
from axon.errors import UserError, suggest

OPERATIONS = ("attention", "paged_attention", "cross_entropy", "grouped_matmul", "quantized_matmul", "sampling")


def check_names(asked: Mapping[str, str]) -> None:
    """Raises `UserError` where what was asked for by name is for no operation that there is."""
    for operation in asked:
        if operation not in OPERATIONS:
            raise UserError(f"kernels: no operation is called {operation!r}.{suggest(operation, OPERATIONS)}")


def platform() -> str:
    """Where the program that is being traced will run: the layout's platform, `cpu` without a layout."""
    scope = current()
    return "cpu" if scope is None else scope.placement.platform


def with_tpu(unfit: str | None, others: Mapping[str, str | None]) -> dict[str, str | None]:
    """`others`, and the Pallas kernel for TPUs with why it cannot do this: `unfit`, or where the program will run.

    The kernel comes first, so that a choice of another says why; last on a CPU, where nobody expects it.
    """
    target = platform()
    if target == "tpu":
        return {"tpu": unfit, **others}
    elsewhere = {"tpu": f"this program is for a {target}"}
    return {**others, **elsewhere} if target == "cpu" else {**elsewhere, **others}


def choose(operation: str, candidates: Mapping[str, str | None], detail: str = "") -> str:
    """The name of the implementation to run; said once, with why those before it could not.

    Args:
        candidates: implementation → why it cannot do this, None if it can; the best first.
        detail: what is being done, to say with the choice.

    The layout's program may ask for one by name (`Train.kernels`); then that one runs, or this raises `UserError`.
    """
    scope = current()
    asked = None if scope is None else scope.kernels.get(operation)
    if asked is not None and asked not in candidates:
        raise UserError(f"kernels: {operation} has no implementation {asked!r}.{suggest(asked, candidates)}")
    if asked is not None and (reason := candidates[asked]) is not None:
        raise UserError(f"kernels: {asked!r} was asked for {operation}, and cannot do it: {reason}")
    fitting = [name for name, reason in candidates.items() if reason is None]
    if not fitting:
        raise UserError(f"{operation}: " + "; ".join(f"{name}: {reason}" for name, reason in candidates.items()))
    chosen = asked or fitting[0]
    passed = [f"not {name}: {why}" for name, why in candidates.items() if why is not None]
    why = "asked for by name" if asked else "; ".join(passed[: list(candidates).index(chosen)])
    log_choice(operation, ", ".join(filter(None, (chosen, detail))) + (f" ({why})" if why else ""))
    return chosen
