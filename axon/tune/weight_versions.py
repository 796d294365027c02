"""`WeightVersions`, a run's weights as they were before some steps, each in a folder of its own that others read."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock

import jax

from axon.axes.array_spec import Specs
from axon.checkpoint import Checkpoints, Reader, Store
from axon.checkpoint.ownership import remove
from axon.launch.agree import process_0_first
from axon.runtime import Runtime, nested
from axon.train.state import State


class WeightVersions:
    """Writes parameters and variables as a checkpoint for each version, shard by shard, while training goes on: whole
    or not at all, as any checkpoint. Of these the last `keep` are there.

    `directory` is created; what an earlier writer left in it is deleted, and at the end all is.
    """

    def __init__(self, directory: Path, runtime: Runtime, keep: int):
        self.directory, self._specs, self._step = directory, _specs(runtime), -1
        with process_0_first("weights"):
            self._delete()
        self._store, self._writing = Store(directory, Checkpoints(keep=keep)), Lock()

    def publish(self, state: State) -> int:
        """The version that the state's weights are: its step, of which there is one state. Returns once the arrays are
        copied."""
        if int(state.step) != self._step:
            self._step = int(state.step)
            with self._writing:
                values = {"parameters": state.parameters, "variables": state.variables}
                self._store.save(self._step, values, {}, self._specs)
        return self._step

    def wait(self) -> None:
        """Returns when all versions can be read."""
        with self._writing:
            self._store.wait()

    def close(self) -> None:
        self._store.close()
        self._delete()

    def _delete(self) -> None:
        if jax.process_index() > 0:
            return
        for step in Reader(self.directory).steps():
            remove(self.directory / str(step))
        with suppress(OSError):  # it is not there, or has what is not ours
            self.directory.rmdir()


def read_weights(directory: Path, version: int, runtime: Runtime) -> State:
    """A state of these weights for a runtime of the same model, whose layout may be another, without an optimizer."""
    specs = _specs(runtime)
    abstract = {name: runtime.abstract(one) for name, one in specs.items()}
    values = Reader(directory).restore_parts(abstract, version, specs)
    return State(version, values["parameters"], {}, values["variables"])


def _specs(runtime: Runtime) -> Mapping[str, Specs]:
    return {"parameters": nested(runtime.parameters), "variables": nested(runtime.variables)}
