"""What `axon plan` is asked: a run, a machine, and what each plan must have."""

from dataclasses import dataclass
from pathlib import Path

from axon.chips import chips
from axon.chips.target import Target


@dataclass(frozen=True)
class Question:
    """Layouts for the training run of the file `config` on the machine `on`.

    Args:
        overrides: bound last, as `Data.batch=512`. pins: the same of `Layout` and `Execution`, which all plans have.
        links: a file of measured bandwidths.
    """

    config: Path
    on: str
    overrides: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    links: Path | None = None

    @property
    def target(self) -> Target:
        """The machine. Raises `UserError` for one that there is not."""
        return Target.of(self.on, dict(chips()))
