"""What `transformers` computes with a tiny random model of each family, stored in fixtures/ by fixtures/make.py.

NumPy alone: the tests import it beside JAX, the script beside torch. Weights are not stored but drawn, each from its
family, name and shape. Of a gradient `DIRECTIONS` random projections are stored (Johnson & Lindenstrauss, 1984): the
norm of a sketch's error is that of the gradient's error, give or take a tenth.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "fixtures"
DIRECTIONS = 64
PAD = 5
"""The id of padding, of models that read a class or a score of a text."""
PROMPT, GREEDY = 8, 64
"""Tokens of a prompt, and of the text that follows it."""
PLUS_ONE = ("gemma2", "gemma2_classes", "gemma3")
"""Families whose norms multiply by 1 + weight."""


@dataclass(frozen=True)
class Reference:
    """One family: its config as `transformers` resolved it, and what the model computed in float32.

    Args:
        shapes: parameter's name → shape, as in files; buffers: the same of what is saved with them and has no gradient.
        tokens: `batch seq`; logits: `batch seq vocab`. loss: mean of the next token's negative log-likelihood, nats.
        gradients: parameter's name → `sketch` of it. greedy: the likeliest ids, one after the other, after `prompt`;
            none of a model that writes no text.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    tokens: np.ndarray
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    greedy: np.ndarray


def load(family: str) -> Reference:
    """The stored fixture of `family`."""
    with np.load(FOLDER / f"{family}.npz") as stored:
        about = json.loads(str(stored["about"]))
        shapes, buffers = ({n: tuple(shape) for n, shape in about[k].items()} for k in ("shapes", "buffers"))
        gradients, loss = dict(zip(shapes, stored["gradients"], strict=True)), float(stored["loss"])
        arrays = stored["tokens"], stored["logits"], loss, gradients, stored["greedy"]
        return Reference(about["config"], shapes, buffers, *arrays)


def load_sketches(name: str) -> dict[str, np.ndarray]:
    """Those stored in `name`.npz."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        return dict(stored)


def save(family: str, made: Reference) -> None:
    """Store `made`; `load` gives it back."""
    about = json.dumps({"config": made.config, "shapes": made.shapes, "buffers": made.buffers})
    arrays = {"tokens": made.tokens, "logits": made.logits, "loss": np.float64(made.loss), "greedy": made.greedy}
    np.savez_compressed(FOLDER / f"{family}.npz", about=about, gradients=np.stack([*made.gradients.values()]), **arrays)


def weights(family: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """A value for every parameter, float32, such that each matters: biases too, and norms' scales are not all one."""
    return {name: _weight(family, name, shape).astype(np.float32) for name, shape in shapes.items()}


def tokens(family: str, vocab: int, batch: int = 2, seq: int = 24) -> np.ndarray:
    """Random ids, `batch seq`."""
    return _generator(family, "tokens").randint(0, vocab, (batch, seq), dtype=np.int32)


def padded(ids: np.ndarray) -> np.ndarray:
    """`ids[batch seq]` of which the first sequence has padding at its end, and none elsewhere."""
    ids = np.where(ids == PAD, PAD + 1, ids)
    ids[0, -7:] = PAD
    return ids


def last(ids: np.ndarray) -> np.ndarray:
    """`batch`, the place of the last token of `padded` sequences."""
    return np.where(ids[:, -1] == PAD, ids.shape[1] - 8, ids.shape[1] - 1)


def prompt(ids: np.ndarray, encoded: bool) -> np.ndarray:
    """What a text follows, of `ids[batch seq]`: the first `PROMPT` of a sequence; a whole one where it is `encoded`, as
    with less to read a tiny encoder–decoder repeats one id."""
    return ids[1] if encoded else ids[0, :PROMPT]


def decoded(ids: np.ndarray) -> np.ndarray:
    """What the decoder of an encoder–decoder is given, whose encoder has `ids[batch seq]`: fewer of them, reversed."""
    return np.ascontiguousarray(ids[:, 16::-1])


def types(ids: np.ndarray) -> np.ndarray:
    """The type of each token, `batch seq`: 0 in the first part of a sequence, and 1 in the second."""
    return np.broadcast_to(np.arange(ids.shape[1]) >= 10, ids.shape).astype(np.int32)


def images(count: int, size: int, channels: int) -> np.ndarray:
    """Random images, `count height width channels`, for a model of images, whose tokens' first are their classes."""
    return _generator("vit", "images").standard_normal((count, size, size, channels)).astype(np.float32)


def sketch(family: str, name: str, gradient: np.ndarray) -> np.ndarray:
    """`DIRECTIONS` projections of `gradient`, float32, their norm that of the gradient in expectation."""
    directions = _generator(family, f"{name}/directions").standard_normal((DIRECTIONS, gradient.size))
    return (directions @ np.ravel(gradient) / DIRECTIONS**0.5).astype(np.float32)


def relative_error(one: np.ndarray, other: np.ndarray, least: float = 0.0) -> float:
    """‖one − other‖ / ‖other‖, or / `least` if that is larger, or ‖one‖ where all of it is zero, as the gradient of an
    expert without tokens."""
    wide = np.asarray(other, np.float64)
    return float(np.linalg.norm(one - wide) / (max(np.linalg.norm(wide), least) or 1.0))


def least_norm(gradients: Mapping[str, np.ndarray]) -> float:
    """Below which a gradient is as good as none: a bias of keys has none, but for rounding."""
    return 1e-3 * float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values())))


def _weight(family: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    drawn = _generator(family, name).standard_normal(shape)
    if len(shape) > 1:
        return drawn * min(shape) ** -0.5
    is_scale = name.endswith(".weight")
    return 0.3 * drawn + (is_scale and family not in PLUS_ONE)


def _generator(family: str, name: str) -> np.random.RandomState:
    """Of the old kind, because its stream is the same in every version of NumPy; a `Generator`'s need not be."""
    return np.random.RandomState(zlib.crc32(f"{family}/{name}".encode()))
