"""Runs the model in this folder, without Axon: `python run.py 5 17 42 --tokens 8` prints the ids that follow 5 17 42.

Needs `pip install jax flatbuffers safetensors`. In manifest.json are the axes, shape and dtype of every array, for each
platform. From Python: `model = Model(FOLDER)`, then `model.logits(tokens)` or `model.generate(prompt, count)`.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from safetensors.numpy import load_file


class Model:
    """An exported model, on the first device of a platform: `cpu`, `cuda` or `tpu`; by default where JAX runs."""

    def __init__(self, folder, platform=None):
        folder = Path(folder)
        self.manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        platform = platform or {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        if platform not in self.manifest["programs"]:
            raise ValueError(f"exported for {', '.join(self.manifest['programs'])}, and this is {platform}")
        self.programs = self.manifest["programs"][platform]
        self.device = jax.devices(platform)[0]
        arrays = {name: value for file in self.manifest["weights"] for name, value in load_file(folder / file).items()}
        self.weights = jax.device_put(arrays, self.device)
        self._forward, self._decode = (
            self._read(folder / self.programs[name]["file"]) for name in ("forward", "decode")
        )

    def logits(self, tokens):
        """Of every position: ids `batch seq` → `batch seq vocab`. What is shorter than `seq` is padded at its end with
        any id: no position sees a later one."""
        tokens = self._ids(tokens)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return self._forward(self.weights, tokens, positions)

    def empty_cache(self):
        """For `step`: zeros."""
        specs = self.programs["decode"]["inputs"]["cache"]
        return {n: jnp.zeros(s["shape"], s["dtype"], device=self.device) for n, s in specs.items()}

    def step(self, cache, tokens, start):
        """The next token's logits `batch vocab`, and the cache with `tokens` (`batch 1`) at position `start` in it.

        The cache that was given is used up where the platform can update it in place."""
        if not 0 <= start < self.manifest["length"]:
            raise ValueError(f"position {start}: the cache has {self.manifest['length']}")
        return self._decode(self.weights, cache, self._ids(tokens), np.int32(start))

    def generate(self, prompt, count):
        """`count` likeliest ids after `prompt`, the same in each sequence of the batch."""
        length, batch = self.manifest["length"], self.manifest["batch"]
        if not prompt or len(prompt) + count > length:
            raise ValueError(f"a prompt of {len(prompt)} ids and {count} more; expected 1 to {length} in all")
        cache, ids = self.empty_cache(), list(prompt)
        for start in range(len(prompt) + count - 1):
            logits, cache = self.step(cache, np.full((batch, 1), ids[start]), start)
            if start >= len(prompt) - 1:
                ids.append(int(np.argmax(logits[0])))
        return ids[len(prompt) :]

    def _ids(self, tokens):
        tokens, vocab = np.asarray(tokens, np.int32), self.manifest["vocab"]
        if np.any((tokens < 0) | (tokens >= vocab)):
            raise ValueError(f"ids must be in [0, {vocab})")
        return tokens

    def _read(self, file):
        exported = export.deserialize(bytearray(file.read_bytes()))
        is_decode = file.name.startswith("decode")
        return jax.jit(exported.call, donate_argnums=(1,) if is_decode else ())


def main():
    parser = argparse.ArgumentParser(description="The likeliest ids after a prompt of ids.")
    parser.add_argument("prompt", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()
    print(*Model(Path(__file__).parent).generate(arguments.prompt, arguments.tokens))


if __name__ == "__main__":
    main()
