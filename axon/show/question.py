"""What `axon plan` is asked: a run, a machine, and what each plan must have."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from axon.chips import chips
from axon.chips.target import Target
from axon.errors import UserError

_CPU = re.compile(r"cpu:([1-9]\d{0,3})")


@dataclass(frozen=True)
class Question:
    """Layouts for the training run of the file `config` on the machine `on`.

    Args:
        overrides: bound last, as `Data.batch=512`. pins: the same of `Layout` and `Execution`, which all plans have.
        links: a file of measured bandwidths.
        formats: of the blocks' products, each a name of a recipe or "none"; all are tried, by default the config's own.
    """

    config: Path
    on: str
    overrides: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    links: Path | None = None
    formats: tuple[str, ...] = ()

    def of_each_format(self) -> list["Question"]:
        """The question with each of its formats as the config's own."""
        recipes = [None if name == "none" else f"@{name}()" for name in dict.fromkeys(self.formats)]
        return [replace(self, overrides=(*self.overrides, f"Precision.recipe={one}")) for one in recipes] or [self]

    @cached_property
    def target(self) -> Target:
        """The machine; `cpu:8` is this one, measured, as so many devices. Raises `UserError` for one that is none."""
        if self.on.partition(":")[0] != "cpu":
            return Target.of(self.on, dict(chips()))
        if (cpu := _CPU.fullmatch(self.on)) is None:
            raise UserError(f"target {self.on!r} (--on): write the number of devices of this machine's CPU, as cpu:8")
        from axon.plan.this_cpu import this_cpu  # which runs JAX

        chip = this_cpu(int(cpu[1]))
        return Target.of(f"{chip.name}:{chip.host}", {chip.name: chip})
