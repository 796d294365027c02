"""A run that begins with the whole state of another: its cool-down, or a longer run, under another schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon.checkpoint import CheckpointError, Reader
from axon.checkpoint.huggingface.hub import is_hub
from axon.checkpoint.verify import content_digest
from axon.config import dump
from axon.errors import UserError
from axon.fields import differences, may_change
from axon.run.init_from import InitFrom
from axon.run.restore import check_finite, check_same_mesh, restore_state
from axon.run.trained import Report, TrainedRun
from axon.run.tree import Train
from axon.runtime import Runtime
from axon.train.state import State
from axon.train.step import Program

PARENT = "parent"
"""Name in `run.json` and in `extra` of what a branch began with: see `Branch.parent`."""


@dataclass(frozen=True)
class Branch:
    """What `InitFrom.optimizer` says: the checkpoint of another run, all of which is taken."""

    train: Train
    source: TrainedRun
    reader: Reader
    step: int

    @classmethod
    def of(cls, train: Train, init_from: InitFrom) -> "Branch":
        """Reads no array. Raises `UserError` if there is no such checkpoint, or `train` ends before it."""
        if is_hub(init_from.source):
            raise UserError(
                f"InitFrom.optimizer is True, and {init_from.source} has no optimizer's state: name the folder of a "
                "run, or set it to False"
            )
        source = TrainedRun(init_from.source, whole=True)
        reader = source.reader()
        step = int(reader.folder(init_from.step).name)
        if step >= train.steps:
            raise UserError(
                f"Train.steps is {train.steps}, and the state in {init_from.source} is of step {step}, from which this "
                "run continues: raise Train.steps, and those of its schedule, or set InitFrom.step to an earlier one"
            )
        return cls(train, source, reader, step)

    @property
    def parent(self) -> dict[str, Any]:
        """The run that it began with, by name and folder; the step; a digest of the checkpoint; and that one's own
        parent."""
        extra, folder = self.reader.extra(self.step), self.source.folder
        found = {
            "run": folder.identifier() if folder.id.is_file() else None,
            "folder": str(folder.path.absolute()),
            "step": self.step,
            "digest": content_digest(self.reader.folder(self.step)),
        }
        return found | ({PARENT: extra[PARENT]} if PARENT in extra else {})

    def digest(self) -> str:
        """Stands for the state that is taken."""
        return f"step {self.step}, {self.parent['digest']}"

    def check_same_tokens(self, tokenizer: str, runtime: Runtime) -> None:
        """Raise `UserError` if `tokenizer`, the text of a tokenizer.json, is not the other run's."""
        self.source.check_same_tokens(tokenizer)

    def companions(self, runtime: Runtime) -> Path | None:
        """See `axon.run.trained.Trained`."""
        return self.source.companions

    def restore(self, program: Program, report: Report) -> tuple[State, dict[str, Any]]:
        """The state, and what is saved with it as this run's. Says what the two runs differ in, and the place in the
        data. Raises `UserError` for a state that is not of this run's model and optimizer."""
        check_same_mesh(self.reader.extra(self.step).get("mesh", {}), program.update.mesh)
        try:
            state, extra = restore_state(self.reader, program, self.step)
        except CheckpointError as error:
            raise UserError(f"Train.init_from with InitFrom.optimizer = True: {error}") from error
        check_finite(self.reader, program.runtime, state.parameters)
        for line in self._lines():
            report(line)
        return state, extra | {"seed": self.train.seed, "config": dump(self.train), PARENT: self.parent}

    def _lines(self) -> list[str]:
        mine = (*differences(self.source.train, self.train, may_change),)
        own = [line for line in mine if not line.startswith("init_from")]
        moved = [line for line in own if line.startswith(("data", "seed"))]
        place = "batches are those that follow there"
        if moved:
            place = f"data or seed differ, so batches are those from step {self.step} on of their own order"
        begun = f"continues from step {self.step} of {self.source.folder.path}, with the optimizer's state; {place}"
        return [begun, *(f"  differs in {line}" for line in own)]


def parent_text(parent: Mapping[str, Any]) -> str:
    """A run's parents for a person, the nearest first."""
    text = f"begun from step {parent.get('step')} of run {parent.get('run')} in {parent.get('folder')}"
    text += f" (checkpoint {parent['digest']})" if parent.get("digest") else ""
    further = parent.get(PARENT)
    return f"{text}, {parent_text(further)}" if isinstance(further, Mapping) else text
