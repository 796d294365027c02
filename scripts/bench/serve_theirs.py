"""The same weights in transformers: what the engine is measured against.

Only this module imports torch and transformers, so that the rest of the benchmarks need neither.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.hub import CONFIG
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.save import Entry, fetch_from, write_weights
from axon.checkpoint.huggingface.save import Theirs as Arrays
from axon.checkpoint.huggingface.tables import table_for
from axon.runtime import flattened
from axon.serve.request import Request
from models.llama import Llama


class Theirs:
    """transformers' model with our weights, on as many threads as this process may use."""

    def __init__(self, model: Llama, parameters: Any):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        with TemporaryDirectory() as folder:
            _write(Path(folder), model, parameters)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = loaded.eval()

    def answer(self, requests: Sequence[Request], size: int) -> int:
        """Batches of `size`, one after the other; the tokens of all texts, without what is beyond their ends."""
        return sum(len(ids) for ids in self.texts(requests, size))

    def texts(self, requests: Sequence[Request], size: int) -> list[list[int]]:
        """Of each request its text's ids; a batch is padded before its prompts, and as long as its longest text."""
        found = []
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            written = self._generate(batch).tolist()
            found += [ids[: one.sampling.tokens] for ids, one in zip(written, batch, strict=True)]
        return found

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Request]) -> torch.Tensor:
        longest = max(len(one.prompt) for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.prompt)) + [*one.prompt] for one in batch])
        mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        tokens = max(one.sampling.tokens for one in batch)
        config = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return self._model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:]


def _write(folder: Path, model: Llama, parameters: Any) -> None:
    table = table_for(model)
    pieces = pieces_of(table, model.build(), model.vocab)
    entries = [Entry(name, "F32", shape) for name, shape in pieces.shapes.items()]
    write_weights(folder, entries, Arrays(pieces, fetch_from(flattened(parameters))))
    (folder / CONFIG).write_text(json.dumps(write_config(table, model) | {"max_position_embeddings": 4096}))
