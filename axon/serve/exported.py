"""Runs the model in this folder, without Axon: `python run.py 5 17 42 --tokens 8` prints the ids that follow 5 17 42,
or with which an encoder–decoder answers them.

Needs `pip install jax flatbuffers safetensors`. In manifest.json are the axes, shape and dtype of every array, for each
platform. From Python: `model = load(FOLDER)`, then `model.generate(prompt, count)`; or `model.logits(tokens)`, of an
encoder–decoder `model.encode(tokens, lengths)`, and `model.step(cache, tokens, start)`.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from safetensors.numpy import load_file


def load(folder, platform=None):
    """The model in a folder, on the first device of a platform: `cpu`, `cuda` or `tpu`; by default where JAX runs."""
    folder = Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    platform = platform or {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platform not in manifest["programs"]:
        raise ValueError(f"exported for {', '.join(manifest['programs'])}, and this is {platform}")
    kind = EncoderDecoder if "encode" in manifest["programs"][platform] else DecoderOnly
    return kind(folder, manifest, platform)


class Model:
    """Parts that both kinds of model have: weights, programs, and a decode step."""

    def __init__(self, folder, manifest, platform):
        self.manifest, self.programs, self.device = manifest, manifest["programs"][platform], jax.devices(platform)[0]
        arrays = {name: value for file in manifest["weights"] for name, value in load_file(folder / file).items()}
        self.weights = jax.device_put(arrays, self.device)
        self._run = {
            name: self._read(folder, name) for name in ("forward", "encode", "decode") if name in self.programs
        }

    def step(self, cache, tokens, start):
        """The next token's logits `batch vocab`, and the cache with `tokens` (`batch 1`) at position `start` in it.

        The cache that was given is used up where the platform can update it in place."""
        if not 0 <= start < self.manifest["length"]:
            raise ValueError(f"position {start}: the cache has {self.manifest['length']}")
        return self._run["decode"](self.weights, cache, self._ids(tokens), np.int32(start))

    def _next(self, cache, token, start):
        """As `step`, of the same token in each sequence of the batch."""
        return self.step(cache, np.full((self.manifest["batch"], 1), token), start)

    def _ids(self, tokens):
        tokens, vocab = np.asarray(tokens, np.int32), self.manifest["vocab"]
        if np.any((tokens < 0) | (tokens >= vocab)):
            raise ValueError(f"ids must be in [0, {vocab})")
        return tokens

    def _read(self, folder, name):
        exported = export.deserialize(bytearray((folder / self.programs[name]["file"]).read_bytes()))
        return jax.jit(exported.call, donate_argnums=(1,) if name == "decode" else ())


class DecoderOnly(Model):
    """A model that continues a prompt."""

    def logits(self, tokens):
        """Of every position: ids `batch seq` → `batch seq vocab`. What is shorter than `seq` is padded at its end with
        any id: no position sees a later one."""
        tokens = self._ids(tokens)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return self._run["forward"](self.weights, tokens, positions)

    def empty_cache(self):
        """For `step`: zeros."""
        specs = self.programs["decode"]["inputs"]["cache"]
        return {n: jnp.zeros(s["shape"], s["dtype"], device=self.device) for n, s in specs.items()}

    def generate(self, prompt, count):
        """`count` most likely ids after `prompt`, the same in each sequence of the batch."""
        length = self.manifest["length"]
        if not prompt or len(prompt) + count > length:
            raise ValueError(f"a prompt of {len(prompt)} ids and {count} more; expected 1 to {length} in all")
        cache, ids = self.empty_cache(), list(prompt)
        for start in range(len(prompt) + count - 1):
            logits, cache = self._next(cache, ids[start], start)
            if start >= len(prompt) - 1:
                ids.append(int(np.argmax(logits[0])))
        return ids[len(prompt) :]


class EncoderDecoder(Model):
    """A model that answers a prompt."""

    def encode(self, tokens, lengths):
        """The encoder's output `batch seq embed`, the logits `batch vocab` of the first id of each answer, and the
        cache that `step` goes on from at position 1.

        `tokens`: ids `batch seq`, of which the first `lengths` (`batch`) of each sequence are read."""
        tokens, lengths = self._ids(tokens), np.asarray(lengths)
        if np.any((lengths < 1) | (lengths > tokens.shape[1])):
            raise ValueError(f"lengths must be in [1, {tokens.shape[1]}]")
        return self._run["encode"](self.weights, tokens, lengths.astype(np.int32))

    def generate(self, prompt, count):
        """The `count` most likely ids of an answer to `prompt`, the same in each sequence of the batch."""
        length, batch = self.manifest["length"], self.manifest["batch"]
        if not 1 <= len(prompt) <= length or not 1 <= count <= length:
            raise ValueError(f"a prompt of {len(prompt)} ids and {count} of an answer; expected 1 to {length} of each")
        tokens = np.zeros((batch, length), np.int32)
        tokens[:, : len(prompt)] = prompt
        _, logits, cache = self.encode(tokens, np.full(batch, len(prompt)))
        ids = [int(np.argmax(logits[0]))]
        while len(ids) < count:
            logits, cache = self._next(cache, ids[-1], len(ids))
            ids.append(int(np.argmax(logits[0])))
        return ids


def main():
    parser = argparse.ArgumentParser(description="The most likely ids after a prompt of ids.")
    parser.add_argument("prompt", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()
    print(*load(Path(__file__).parent).generate(arguments.prompt, arguments.tokens))


if __name__ == "__main__":
    main()
