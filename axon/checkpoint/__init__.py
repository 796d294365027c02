"""Save, verify and restore the state of a run: Orbax behind a thin module."""

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.keep import Checkpoints
from axon.checkpoint.reader import Reader
from axon.checkpoint.store import Store

__all__ = ["CheckpointError", "Checkpoints", "Reader", "Store"]
