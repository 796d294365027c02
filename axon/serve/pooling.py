"""How what a model makes of a text's tokens becomes one vector, the text's embedding."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.errors import UserError


@dataclass(frozen=True)
class Pooling:
    """Sentence-BERT's (arXiv:1908.10084), and the last token's, which alone has seen the whole text in a decoder.

    Args:
        mode: the mean over the text's tokens, its first token's output ("cls"), or its last one's. normalise: to length
            1. cuts: to how many numbers an embedding may be cut, as one of a Matryoshka model (arXiv:2205.13147); none,
            or None: any number.
    """

    mode: Literal["mean", "cls", "last"]
    normalise: bool = True
    cuts: tuple[int, ...] | None = ()

    def pooled(self, hidden: Array, lengths: Array) -> Array:
        """`batch embed` float32 of `hidden[batch seq embed]`, in each row of which the first `lengths[batch]` count."""
        hidden = hidden.astype(jnp.float32)
        if self.mode == "cls":
            found = hidden[:, 0]
        elif self.mode == "last":
            last = jnp.maximum(lengths - 1, 0)[:, None, None]
            found = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        else:
            real = jnp.arange(hidden.shape[1]) < lengths[:, None]
            found = jnp.sum(jnp.where(real[..., None], hidden, 0), axis=1) / jnp.maximum(lengths, 1)[:, None]
        return found / jnp.maximum(jnp.linalg.norm(found, axis=-1, keepdims=True), 1e-12) if self.normalise else found

    def check_cut(self, width: int, dimensions: int | None) -> None:
        """Raise `UserError` for embeddings of `width` numbers that may not be cut to `dimensions`; None: not cut."""
        if dimensions in (None, width) or (dimensions < width if self.cuts is None else dimensions in self.cuts):
            return
        said = "the model does not say that they may be cut (is_matryoshka or matryoshka_dimensions in config.json)"
        if self.cuts != ():
            said = f"they may be cut to {', '.join(map(str, self.cuts)) if self.cuts else 'fewer'}"
        raise UserError(f"dimensions is {dimensions}; embeddings have {width}, and {said}")

    def cut(self, embedding: np.ndarray, dimensions: int | None) -> np.ndarray:
        """The first numbers, normalised anew."""
        if dimensions is None or dimensions == len(embedding):
            return embedding
        part = embedding[:dimensions]
        return part / max(float(np.linalg.norm(part)), 1e-12) if self.normalise else part
