"""A model's arrays with those of an adapter of PEFT's merged into them."""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from axon.checkpoint.huggingface.peft import BIAS, TABLE, Adapter
from axon.checkpoint.huggingface.weights import Weights
from axon.errors import UserError, suggest


class AdaptedWeights(Weights):
    """The arrays of a model in whose matrices an adapter is merged, in float32: W + scale · B·A, of DoRA with its
    magnitudes as norms; and in whose place are those that the adapter has anew. `sign`: -1 where it is merged already,
    and taken out: W − scale · B·A, of what is a sum alone."""

    def __init__(self, folder: Path, adapter: Adapter, sign: float = 1.0):
        super().__init__(folder)
        self._adapter, self._sign = adapter, sign
        if sign < 0 and (adapter.dora or adapter.saved):
            what = "scales the weights too (use_dora)" if adapter.dora else f"has {min(adapter.saved)} anew"
            raise UserError(
                f"{adapter.name} {what}, and what they were is not in a model in which it is merged: name the one that "
                f"it is of, {adapter.base}"
            )

    def complete(self, prefix: str, wanted: Collection[str]) -> None:
        """As of `Weights`. Raises `UserError` for an adapter of arrays that the model has not, or of other shapes."""
        super().complete(prefix, wanted)
        adapter = self._adapter
        for name in (*adapter.factors, *adapter.saved, *adapter.biases):
            if name not in self:
                more = " PEFT cannot merge it, either" * (name in adapter.biases)
                raise UserError(
                    f"{adapter.name} adapts {name}, which is not in {self.folder}.{suggest(name, self.shapes)}{more}"
                )
        for name, own in (*adapter.saved.items(), *adapter.biases.items()):
            if self.shape(name) != (shape := adapter.weights.shape(own)):
                raise UserError(f"{adapter.name} has {name} as {shape}; it is {self.shape(name)} in {self.folder}")
        for name in adapter.factors:
            self._check_factors(name)

    def _check_factors(self, name: str) -> None:
        adapter, factors = self._adapter, self._adapter.factors[name]
        (rank, inputs), (outputs, *_), *more = map(adapter.weights.shape, factors)
        sides = (inputs, outputs) if self._is_transposed(factors) else (outputs, inputs)
        if self.shape(name) != sides or rank != adapter.rank_of(name) or any(one != (outputs,) for one in more):
            raise UserError(
                f"{adapter.name} adapts {name} as {sides} by rank {rank}; it is {self.shape(name)} in "
                f"{self.folder}, and the rank {adapter.rank_of(name)}"
            )

    def whole_digest(self) -> str:
        return f"{super().whole_digest()} {self._adapter.weights.whole_digest()}"

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        if name not in self._adapter.factors:
            return self._with_bias(name, where)
        factors = self._adapter.factors[name]
        is_transposed = self._is_transposed(factors)
        rows, columns = reversed(where) if is_transposed else where
        read = slice(None) if self._adapter.dora else columns  # a norm is of whole rows
        found = self._base(name, (read, rows) if is_transposed else (rows, read)).astype(np.float32)
        merged = self._merged(name, found.T if is_transposed else found, rows, read)
        merged = merged[:, columns] if self._adapter.dora else merged
        return merged.T if is_transposed else merged

    def _with_bias(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        base, own = self._base(name, where), self._adapter.biases.get(name)
        if own is None:
            return base
        added = self._adapter.weights.read(own, where).astype(np.float32)
        return base.astype(np.float32) + self._scale(name.removesuffix(BIAS)) * added

    def _base(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        own = self._adapter.saved.get(name)
        return super().read(name, where) if own is None else self._adapter.weights.read(own, where)

    def _merged(self, name: str, base: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        """Some rows and columns of `out in`, of those of the base."""
        weights, factors, every = self._adapter.weights, self._adapter.factors[name], slice(None)
        a, b = weights.read(factors[0], (every, columns)), weights.read(factors[1], (rows, every))
        merged = base + self._scale(name) * (b.astype(np.float32) @ a.astype(np.float32))
        if not self._adapter.dora:
            return merged
        norm = np.linalg.norm(merged, axis=1, keepdims=True)
        magnitude = weights.read(factors[2], (rows,)).astype(np.float32)[:, None]
        return merged * np.divide(magnitude, norm, where=norm > 0, out=np.zeros_like(norm))

    def _scale(self, name: str) -> float:
        return self._sign * self._adapter.scale_of(name)

    def _is_transposed(self, factors: tuple[str, ...]) -> bool:
        """Whether the matrix lies as `in out`."""
        return self._adapter.transposed or factors[0].endswith(TABLE[0])
