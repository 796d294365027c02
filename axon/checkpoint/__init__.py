"""Save, verify and restore the state of a run: Orbax behind a thin module."""

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.keep import Checkpoints
from axon.checkpoint.reader import Reader
from axon.checkpoint.store import Store
from axon.checkpoint.tiers import RunStore, newest_reader, open_store
