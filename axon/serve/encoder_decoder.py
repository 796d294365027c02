"""What serving asks of a model that reads one sequence and writes another."""

from typing import Any, Protocol, runtime_checkable

from jax import Array

from axon.nn import Inputs
from axon.serve.unpaged import Generative


@runtime_checkable
class EncoderDecoder(Generative, Protocol):
    """An encoder–decoder, as `models.t5.T5` builds one; `start_id`: what an answer begins with."""

    start_id: int  # pyright: ignore[reportIncompatibleVariableOverride] - narrower than of `Generative`: never None

    def encode(self, inputs: Inputs) -> tuple[Array, Any]:
        """What the encoder makes of what is read, `batch seq.residual embed`, and auxiliary terms."""
        ...

    def decode(self, inputs: Inputs, encoded: Array, documents: Array | None) -> tuple[Array, Any]:
        """What `output` predicts the ids from that follow each of `inputs`, `batch seq.residual embed`, and auxiliary
        terms. `documents[batch seq]`: of what was read, -1 where it is padding."""
        ...

    def begin(self, encoded: Array, documents: Array, room: int) -> tuple[Array, Any]:
        """What `output` predicts the first id of an answer from, `batch 1 embed`, and what `advance` goes on from:
        (cache, documents, place of the next id). `room`: for how many ids after the start."""
        ...
