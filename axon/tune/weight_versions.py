"""`WeightVersions`, a run's weights as they were before some steps, each in a folder of its own that others read by a
`WeightReader`."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import jax

from axon.axes.array_spec import Specs
from axon.checkpoint import Checkpoints, Reader, Store
from axon.checkpoint.ownership import remove
from axon.launch.agree import process_0_first
from axon.runtime import Runtime, flattened, nested
from axon.train.state import State

FROZEN = "frozen"
"""The folder of what does not change, within that of the versions."""


class WeightVersions:
    """Writes parameters and variables as a checkpoint for each version, shard by shard, while training goes on: whole
    or not at all, as any checkpoint. Of these the last `keep` are there. What is frozen, as the base of adapters, is
    written once.

    `directory` is created; what an earlier writer left in it is deleted, and at the end all is.
    """

    def __init__(self, directory: Path, runtime: Runtime, keep: int):
        self.directory, self._runtime, self._step = directory, runtime, -1
        with process_0_first("weights"):
            self._delete()
        self._store, self._writing = Store(directory, Checkpoints(keep=keep)), Lock()
        self._frozen = Store(directory / FROZEN, Checkpoints(keep=1)) if _frozen(runtime) else None

    def publish(self, state: State) -> int:
        """The version that the state's weights are: its step, of which there is one state. Returns once the arrays are
        copied."""
        if int(state.step) != self._step:
            first, self._step = self._step < 0, int(state.step)
            values = flattened(state.parameters)
            with self._writing:
                if self._frozen is not None and first:
                    _save(self._frozen, 0, {"parameters": values}, {"parameters": _frozen(self._runtime)})
                parts = {"parameters": values, "variables": flattened(state.variables)}
                _save(self._store, self._step, parts, _changing(self._runtime))
        return self._step

    def wait(self) -> None:
        """Returns when all versions can be read."""
        with self._writing:
            self._store.wait()
            if self._frozen is not None:
                self._frozen.wait()

    def close(self) -> None:
        self._store.close()
        if self._frozen is not None:
            self._frozen.close()
        self._delete()

    def _delete(self) -> None:
        if jax.process_index() > 0:
            return
        for folder in (self.directory / FROZEN, self.directory):
            for step in Reader(folder).steps():
                remove(folder / str(step))
            with suppress(OSError):  # it is not there, or has what is not ours
                folder.rmdir()


class WeightReader:
    """Reads versions for a runtime of the same model, whose layout may be another; what is frozen once."""

    def __init__(self, directory: Path, runtime: Runtime):
        self._directory, self._runtime, self._fixed = directory, runtime, None

    def state(self, version: int) -> State:
        """A state of these weights, without an optimizer."""
        values = _restored(Reader(self._directory), version, self._runtime, _changing(self._runtime))
        if self._fixed is None and (specs := _frozen(self._runtime)):
            reader = Reader(self._directory / FROZEN)
            self._fixed = _restored(reader, 0, self._runtime, {"parameters": specs})["parameters"]
        parameters = {**values["parameters"], **(self._fixed or {})}
        return State(version, nested(parameters), {}, nested(values["variables"]))


def _changing(runtime: Runtime) -> dict[str, Specs]:
    trained = {path: spec for path, spec in runtime.parameters.items() if spec.trained}
    return {"parameters": trained, "variables": runtime.variables}


def _frozen(runtime: Runtime) -> Specs:
    return {path: spec for path, spec in runtime.parameters.items() if not spec.trained}


def _save(store: Store, step: int, values: Mapping[str, Mapping[str, Any]], specs: Mapping[str, Specs]) -> None:
    """Of the `values` by part and path those of `specs`."""
    parts = {name: nested({path: values[name][path] for path in own}) for name, own in specs.items()}
    store.save(step, parts, {}, {name: nested(own) for name, own in specs.items()})


def _restored(reader: Reader, step: int, runtime: Runtime, specs: Mapping[str, Specs]) -> dict[str, dict[str, Any]]:
    """By part and path."""
    parts = {name: nested(own) for name, own in specs.items()}
    found = reader.restore_parts({name: runtime.abstract(own) for name, own in parts.items()}, step, parts)
    return {name: flattened(found[name]) for name in specs}
