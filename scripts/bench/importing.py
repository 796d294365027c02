"""`axon bench import`: weights from safetensors files onto a device and into a checkpoint, and the memory it takes."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import tokenizers

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.hub import CONFIG, PREFIX
from axon.checkpoint.huggingface.model import open_model
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.save import Entry, write_weights
from axon.checkpoint.huggingface.tables import table_for
from axon.checkpoint.huggingface.tokenizer import FILE
from axon.layout import Layout
from axon.run.convert import convert
from axon.runtime import Runtime, flattened
from models.llama import Llama
from scripts.bench.disk import drop_cached
from scripts.bench.timing import progress

MODEL = Llama(vocab=32_000, embed=2048, layers=7, heads=16, kv_heads=16, mlp=5632)
"""981 MB in bfloat16."""
Work = Callable[[Path, Path], int]


def run(model: Llama = MODEL, rounds: int = 3, folder: str | None = None) -> dict[str, Any]:
    """Medians of `rounds` rounds, each in a process of its own, in `folder`.

    MB/s are of the files, bfloat16, which are first dropped from the page cache. `load` is what `Train.init_from` does,
    on one CPU device; `convert` is `axon convert`, until the checkpoint is complete. `_cpu`: seconds of processor time.
    `_memory`: MB of the host's memory at the peak beyond those of the process before, and the loaded arrays.
    """
    with TemporaryDirectory(dir=folder or ".") as where:
        source = Path(where) / "model"
        size = _write(source, model)
        found = [_round(source, Path(where) / f"run_{number}", size, number) for number in range(rounds)]
    result = {name: float(np.median([one[name] for one in found])) for name in found[0]}
    return result | {"megabytes": size / 1e6, "rounds": rounds, "jax": jax.__version__, "cores": os.cpu_count()}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    names = {"load": "Train.init_from, onto one device", "convert": "axon convert, into a checkpoint"}
    return [
        ("the model, in bfloat16", f"{result['megabytes']:,.0f} MB"),
        *((what, f"{result[name]:,.0f} MB/s") for name, what in names.items()),
        *((f"{name}: processor time", f"{result[f'{name}_cpu']:.2f} s") for name in names),
        *((f"{name}: memory beyond the arrays, at the peak", f"{result[f'{name}_memory']:,.0f} MB") for name in names),
    ]


def _write(folder: Path, model: Llama) -> int:
    """A model of random bits, whose exponents are those of small numbers; returns the bytes of its weights."""
    progress("import: writing a model")
    folder.mkdir()
    table, rng = table_for(model), np.random.default_rng(0)
    shapes = pieces_of(table, model.build(), model.vocab).shapes

    def array(name: str) -> np.ndarray:
        bits = rng.integers(2**16, size=shapes[name], dtype=np.uint16)
        return (bits & 0x80FF | 0x3C00).view(jax.numpy.bfloat16)

    entries = [Entry(name, "BF16", shape) for name, shape in shapes.items()]
    for name in write_weights(folder, entries, array):
        with (folder / name).open("rb") as file:
            os.fsync(file)
    (folder / CONFIG).write_text(json.dumps(write_config(table, model) | {"max_position_embeddings": 2048}))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(folder / FILE))
    return sum(entry.nbytes for entry in entries)


def _round(source: Path, out: Path, size: int, number: int) -> dict[str, float]:
    progress(f"import: round {number + 1}")
    found = {}
    for name, work in {"load": _load, "convert": _convert}.items():
        drop_cached(source)
        with multiprocessing.get_context("spawn").Pool(1) as process:
            seconds, cpu, memory = process.apply(_measured, (work, source, out))
        found |= {name: size / 1e6 / seconds, f"{name}_cpu": cpu, f"{name}_memory": memory / 1e6}
    return found


def _measured(work: Work, source: Path, out: Path) -> tuple[float, float, int]:
    """Seconds, seconds of processor time, and bytes of memory beyond those that `work` returns."""
    jax.devices()
    before, began, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
    arrays = work(source, out)
    return time.perf_counter() - began, time.process_time() - cpu, _memory("VmHWM") - before - arrays


def _load(source: Path, out: Path) -> int:
    hub = open_model(f"{PREFIX}{source}")
    runtime = Runtime(hub.model, Layout(), devices=jax.devices()[:1])
    values = jax.block_until_ready(hub.load(runtime, hub.model.vocab)[0])
    return sum(value.nbytes for value in flattened(values).values())


def _convert(source: Path, out: Path) -> int:
    convert(f"{PREFIX}{source}", str(out), report=lambda line: None)
    return 0


def _memory(name: str) -> int:
    """A figure of this process's memory, in bytes, as Linux names it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
