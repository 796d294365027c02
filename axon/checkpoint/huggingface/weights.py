"""Arrays in safetensors files, one or several with an index: read by slices.

The library `safetensors` 0.8 checks a file and reads slices of inner dimensions. What lies in one piece is read here:
the library does so with 30 times the processor time in pieces of 4 MiB, or maps the file, which then counts as memory.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from axon.checkpoint.compare import CheckpointError
from axon.disk import reading
from axon.errors import UserError
from axon.foreign_json import FILE_NAME, object_of, read_field, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
"""Their name of a dtype → NumPy's, of those that weights can be read in."""

PARTS: Mapping[str, Any] = {
    "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64, "F8_E4M3": jnp.float8_e4m3fn
}  # fmt: skip
"""Dtypes as which weights in few bits are stored."""


BLOCK = 2**24
"""Bytes that are hashed at a time."""


class Weights:
    """The arrays in a folder. `single`: the name of the file that has them all, if it is one.

    Raises `CheckpointError` if there are none, or a file of the index is missing or damaged.
    """

    def __init__(self, folder: Path, single: str = SINGLE):
        self.folder, self._single = folder, single
        self._files: dict[str, Any] = {}
        self._ranges: dict[str, dict[str, tuple[int, int]]] = {}
        self._where = self._index()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape."""
        return {name: self.shape(name) for name in self._where}

    @property
    def dtypes(self) -> dict[str, str]:
        """Name → dtype, as `DTYPES` names it."""
        return {name: self._slice(name).get_dtype() for name in self._where}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def metadata(self, file: str) -> dict[str, str]:
        """Metadata of a file, beside its arrays."""
        return self._open(file).metadata() or {}

    def whole_digest(self) -> str:
        """Stands for the names in the files, shapes, and every number, as stored; several arrays at a time."""
        digest = hashlib.sha256()
        files = sorted((stored, file) for file, stored in self._index().values())
        with ThreadPoolExecutor() as pool:
            for one in pool.map(lambda at: self._hashed(*at), files):
                digest.update(one)
        return digest.hexdigest()

    def _hashed(self, stored: str, file: str) -> bytes:
        """A digest of an array of a file, with its name, shape and dtype."""
        found = self._open(file).get_slice(stored)
        digest = hashlib.sha256(f"{stored} {found.get_shape()} {found.get_dtype()} ".encode())
        start, end = self._ranges[file][stored]
        with reading(self.folder / file), (self.folder / file).open("rb", buffering=0) as opened:
            opened.seek(start)
            while start < end and (read := opened.read(min(BLOCK, end - start))):
                digest.update(read)
                start += len(read)
        return digest.digest()

    def digest(self) -> str:
        """Stands for the names in the files, shapes, and the first row of each array: for what is compared at every
        start. Training changes nearly all rows; `whole_digest` tells apart what differs in few, too."""
        digest = hashlib.blake2b(digest_size=8)
        for stored, name in sorted((stored, name) for name, (_, stored) in self._where.items()):
            shape = self.shape(name)
            first = tuple(slice(size if at else 1) for at, size in enumerate(shape))
            digest.update(f"{stored} {shape} ".encode() + self.read(name, first).tobytes())
        return digest.hexdigest()

    def rename(self, old: str, new: str) -> None:
        self._where[new] = self._where.pop(old)

    def complete(self, prefix: str, wanted: Collection[str]) -> None:
        """Give names that lack `prefix` what `wanted` has."""
        self._where = {
            f"{prefix}{n}" if n not in wanted and f"{prefix}{n}" in wanted else n: at for n, at in self._where.items()
        }

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of an array, as it is stored. Safe in several threads."""
        found = self._slice(name)
        shape = found.get_shape()
        ranges = [one.indices(size)[:2] for one, size in zip(where, shape, strict=True)]
        if all(one == (0, size) for one, size in zip(ranges[1:], shape[1:], strict=True)):
            return self._read_rows(name, *(ranges[0] if ranges else (0, 1)), tuple(shape))
        return np.asarray(found[where])

    def item_size(self, name: str) -> int:
        """Bytes of an element. Raises `CheckpointError` for a dtype that is not in `DTYPES`."""
        dtype = self._slice(name).get_dtype()
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{self.folder}: {name} is stored as {dtype}, which is quantised; Axon reads {', '.join(DTYPES)}. Use "
                "a copy of the model with bfloat16 weights"
            )
        return np.dtype(DTYPES[dtype]).itemsize

    def _read_rows(self, name: str, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        """A range of the first dimension."""
        file, stored = self._where[name]
        dtype = np.dtype({**DTYPES, **PARTS}[self._slice(name).get_dtype()])
        per_row = math.prod(shape[1:]) * dtype.itemsize
        out, start = np.empty((high - low) * per_row, np.uint8), self._ranges[file][stored][0] + low * per_row
        with reading(self.folder / file), (self.folder / file).open("rb", buffering=0) as opened:
            done = 0
            while done < out.nbytes and (count := os.preadv(opened.fileno(), [out[done:]], start + done)):
                done += count
        if done < out.nbytes:
            raise CheckpointError(f"{self.folder / file} ends within {stored}: it is damaged. Copy it again")
        return out.view(dtype).reshape((high - low, *shape[1:]) if shape else ())

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError

        file, stored = self._where[name]
        try:
            return self._open(file).get_slice(stored)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file} does not have {stored}, which {INDEX} says it has") from error

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            path = self.folder / file
            try:
                with reading(path):
                    opened = safe_open(path, "numpy", backend="pread")
                    self._ranges[file] = _ranges(path)
                    self._files[file] = opened
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged: {error}. Download or copy it again") from error
        return self._files[file]

    def _index(self) -> dict[str, tuple[str, str]]:
        """Name → file, and the name there."""
        if (index := self.folder / INDEX).is_file():
            try:
                files = read_field(str(index), read_json(index), "weight_map", object_of(FILE_NAME))
            except UserError as error:
                raise CheckpointError(f"{error}. The file is damaged: download or copy it again") from error
            return {name: (file, name) for name, file in files.items()}
        if (self.folder / self._single).is_file():
            return {name: (self._single, name) for name in self._open(self._single).keys()}  # noqa: SIM118 - no dictionary
        raise CheckpointError(
            f"{self.folder} has neither {self._single} nor {INDEX}: expected arrays in safetensors, as "
            "transformers saves a model, and PEFT an adapter"
        )


def _ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Name → the bytes of an array, of a file that the library has checked: length of a header, header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + length + start, 8 + length + end) for name, (start, end) in offsets.items()}
