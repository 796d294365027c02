"""The interface of a run to its checkpoints, whether they are in one folder (`Store`) or in two (`Tiers`)."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from etils import epath

from axon.checkpoint.keep import Checkpoints

T = TypeVar("T")


class Restorable(Protocol):
    """Checkpoints to restore from. `step`: None is the latest. Documented and implemented by `Reader`."""

    def latest(self) -> int | None: ...

    def folder(self, step: int | None = None) -> epath.Path: ...

    def extra(self, step: int | None = None) -> dict[str, Any]: ...

    def restore(
        self, abstract_state: Any, step: int | None = None, specs: Any = None
    ) -> tuple[Any, dict[str, Any]]: ...

    def restore_parts(
        self, abstract: Mapping[str, Any], step: int | None = None, specs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]: ...


class RunStore(Restorable, Protocol):
    """The checkpoints of the run that saves them. Documented and implemented by `Store`."""

    directory: epath.Path
    checkpoints: Checkpoints
    losses: dict[int, float]
    copying: set[int]
    notices: list[str]

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def steps(self) -> list[int]: ...

    def newest(self, load: Callable[[], T]) -> T: ...

    def started(self, durable: bool = False) -> int | None: ...

    def saving(self) -> bool: ...

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any], specs: Any = None, *, durable: bool = True
    ) -> None: ...

    def write_checksums(self) -> None: ...

    def wait(self) -> None: ...
