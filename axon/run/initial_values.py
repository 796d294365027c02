"""The parameters that a run starts with, where some are of another model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from axon.axes.patterns import base
from axon.checkpoint.huggingface.model import HubModel
from axon.run.adapter import read_factors
from axon.run.init_from import InitFrom
from axon.run.trained import Report, Trained, TrainedHub, open_trained
from axon.run.tree import Train
from axon.runtime import Runtime, flattened, nested

SHOWN = 5


@runtime_checkable
class ReplacesHead(Protocol):
    """A module with parts `on_top`, in the place of what another model has at the paths `replaced`."""

    on_top: tuple[str, ...]
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class InitialValues:
    """What `Train.init_from` says, opened and compared with the model; `taken`: this model's path → the source's."""

    init_from: InitFrom
    source: Trained
    taken: Mapping[str, str]

    @classmethod
    def of(cls, train: Train, runtime: Runtime, report: Report) -> "InitialValues":
        """The initial values of a run. Reads no array. Raises `UserError` unless they are what the model expects."""
        given = train.init_from
        assert given is not None
        init_from = InitFrom(given) if isinstance(given, str) else given
        source = open_trained(init_from.source)
        changed = source.changed(train.model, init_from.whole)
        for line in (*source.remarks, *(() if init_from.whole else changed.values())):
            report(line)
        offered = _without_replaced(source.offered(train.model), runtime.module, report)
        taken = init_from.taken(offered, runtime.declared, init_from.cast or source.always_cast)
        if init_from.whole:
            init_from.check_changed(changed)
        return cls(init_from, source, taken)

    def check_same_tokens(self, tokenizer: str, runtime: Runtime) -> None:
        """Raise `UserError` if what is taken is of other tokens than those of `tokenizer`, a tokenizer.json's text."""
        if self._has_tokens(runtime):
            self.source.check_same_tokens(tokenizer)

    def companions(self, runtime: Runtime) -> Path | None:
        """See `Trained`; None where what is taken says nothing of tokens."""
        return self.source.companions if self._has_tokens(runtime) else None

    def digest(self) -> str:
        """Stands for what parameters are taken from."""
        return self.source.digest()

    @property
    def _hub(self) -> HubModel | None:
        return self.source.hub if isinstance(self.source, TrainedHub) else None

    def _has_tokens(self, runtime: Runtime) -> bool:
        return any(base(axis) == "vocab" for path in self.taken for axis in runtime.declared[path].axes)

    def read(self, runtime: Runtime, seed: int, report: Report, frozen: Collection[str] = ()) -> dict[str, Any]:
        """All parameters, nested by path: those that are taken read straight into their shards, the others drawn.
        `frozen`: paths of those that the run does not train, of which none should be drawn; reported."""
        read = self.source.read(runtime, self.taken)
        values = flattened(nested({path: runtime.derived(path, read.pop(path)) for path in tuple(read)}))
        if self.init_from.adapter is not None:
            values |= read_factors(self.init_from.adapter, self._hub, runtime)
        rest = [path for path in runtime.parameters if path not in values]
        values |= flattened(runtime.initialise_parameters(seed, rest))
        report(f"parameters from {self.init_from.source}{_rest_text(rest, len(values))}")
        if untrained := [path for path in rest if path in frozen]:
            report(
                f"frozen, so that they keep their initial values: {_listed(untrained)}. Begin from a model that has "
                "them, or train them too: beside one adapter by LoRA.others"
            )
        return nested({path: values[path] for path in runtime.parameters})


def _without_replaced(offered: Mapping[str, Any], module: Any, report: Report) -> dict[str, Any]:
    """Without what parts of this model are in the place of; reported."""
    replaced = [path for path in offered if isinstance(module, ReplacesHead) and path in module.replaced]
    if replaced:
        report(f"not taken: {', '.join(replaced)}, in whose place this model has its {' and '.join(module.on_top)}")
    return {path: array for path, array in offered.items() if path not in replaced}


def _rest_text(rest: list[str], total: int) -> str:
    if not rest:
        return ""
    return f": {total - len(rest)} of {total}; initial values for {_listed(rest)}"


def _listed(paths: Sequence[str]) -> str:
    more = f", and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more
