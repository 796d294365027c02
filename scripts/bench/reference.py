"""The benchmarks' model: a Llama of 16.9 million parameters on eight sequences of 256 tokens; and published shapes."""

import numpy as np

from axon.nn import Llama3Scaling, Rope
from axon.train.optimizers import AdamW, Constant
from models.llama import Llama

BATCH, SEQ = 8, 256
MODEL = Llama(vocab=8192, embed=384, layers=6, heads=6, kv_heads=6, mlp=1024)
OPTIMIZER = AdamW(Constant(3e-4), clip=1.0)

LLAMA3_SCALED_ROPE = Rope(500000.0, Llama3Scaling())
LLAMA3_8B = Llama(vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, rope=LLAMA3_SCALED_ROPE)
LLAMA32_1B = Llama(
    vocab=128256,
    embed=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    mlp=8192,
    rope=Rope(500000.0, Llama3Scaling(factor=32.0)),
    tied=True,
)


def random_batch(seed: int, batch: int = BATCH, seq: int = SEQ, vocab: int = MODEL.vocab) -> dict[str, np.ndarray]:
    """Uniform random tokens, one document a sequence: arrays `batch seq`."""
    ids = np.random.default_rng(seed).integers(0, vocab, (batch, seq + 1), dtype=np.int32)
    return {
        "tokens": ids[:, :-1].copy(),
        "targets": ids[:, 1:].copy(),
        "positions": np.tile(np.arange(seq, dtype=np.int32), (batch, 1)),
        "documents": np.zeros((batch, seq), np.int32),
        "weights": np.ones((batch, seq), np.float32),
    }
