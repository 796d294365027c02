"""`Images`, what a person writes, and `Gallery`, what it prepares: pictures and their classes as batches."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import grain
import numpy as np

from axon.checks import check_range
from axon.data.batches import PADDING, Batches, held_out_order, shuffled_order, without
from axon.data.feed import ALL, Batch, FeedContext, SequenceNumbers
from axon.data.pictures import Letters, Pictures, PictureSource
from axon.data.prepared import NoChats
from axon.data.tokenizer import TokenizerFile
from axon.errors import UserError
from axon.fields import RESUMABLE
from axon.model_config import ImageConfig


@dataclass(frozen=True)
class Images:
    """Pictures to train on, for the objective `Classification`.

    Attributes:
        batch: pictures in the global batch.
        source: where they come from.
        held_out: fraction held out for evaluation, drawn always alike.
        threads: how many prefetch batches; 0: no prefetching.
    """

    batch: int
    source: PictureSource = Letters()
    held_out: float = 0.1
    threads: int = field(default=2, metadata=RESUMABLE)

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "batch")
        check_range(self, "[0, 1)", "held_out")
        check_range(self, "[0, 256]", "threads")
        if isinstance(self.source, type) or not isinstance(self.source, PictureSource):
            raise UserError(f"Images.source is {self.source!r}: expected a source of pictures, as Letters().")

    def prepare(self, report: Callable[[str], None] = print) -> "Gallery":
        """Reads or draws the pictures. Raises `UserError` if they cannot be read, or a split has none."""
        began = time.perf_counter()
        pictures = self.source.pictures()
        count = len(pictures.labels)
        numbers = np.random.RandomState(0).permutation(count)  # of the old kind: its stream never changes
        held_out = round(self.held_out * count)
        if held_out == count or (self.held_out > 0 and not held_out):
            raise UserError(
                f"{self.source.name} has {count} pictures, of which Images.held_out = {self.held_out} holds out "
                f"{held_out}: change it, or give more pictures"
            )
        gallery = Gallery(self, pictures, {"held_out": numbers[:held_out], "train": numbers[held_out:]})
        shape, seconds = " × ".join(map(str, gallery.shape)), time.perf_counter() - began
        report(f"{self.source.name}: {count:,} pictures of {shape}, {held_out:,} held out ({seconds:.1f} s)")
        return gallery

    @property
    def text(self) -> None:
        """Images have none."""

    def with_tokenizer(self, tokenizer: TokenizerFile) -> "Images":
        """See `Data`: these."""
        return self

    def seq_of(self, model: Any) -> int:
        """Positions that `model` makes of an image. Raises `UserError` for one that takes no images."""
        if not isinstance(model, ImageConfig):
            raise UserError(
                f"Train.data are images, and a {type(model).__name__} is no model of images: it lacks `seq`, how many "
                "positions an image has, `image`, `channels` or `classes`. Set Train.model to one, as models.vit.ViT, "
                "or Train.data to @Data()"
            )
        return model.seq

    def identity(self) -> dict[str, Any]:
        """What the batches depend on, as JSON: every field but `threads`."""
        source = {"type": type(self.source).__name__, **asdict(self.source)}  # type: ignore[call-overload]
        return {"batch": self.batch, "source": source, "held_out": self.held_out}


@dataclass(frozen=True)
class Gallery(NoChats):
    """Prepared pictures, in batches of two splits. Returned by `Images.prepare`."""

    data: Images
    pictures: Pictures = field(repr=False)
    splits: dict[str, np.ndarray] = field(repr=False)

    @property
    def tokenizer(self) -> None:
        """Images have none."""

    @property
    def arrays(self) -> Mapping[str, str]:
        """Name → axes of the arrays of a batch."""
        return {"image": "batch height width channels", "label": "batch", "weights": "batch"}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a picture."""
        height, width, *channels = self.pictures.images.shape[1:]
        return height, width, channels[0] if channels else 1

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        return int(np.max(self.pictures.labels)) + 1

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        """Raise `UserError` unless the images and classes are those of `model`."""
        name, source, shape = type(model).__name__, self.data.source.name, (model.image, model.image, model.channels)
        if self.shape != shape:
            raise UserError(
                f"{source}: images are of height, width and channels {self.shape}, and the model's of "
                f"{shape}: set {name}.image and {name}.channels, and Classification's fields, to these"
            )
        if self.classes > model.classes:
            raise UserError(
                f"{source}: the largest label is {self.classes - 1}, and the model has {model.classes} classes: set "
                f"{name}.classes to at least {self.classes}"
            )

    def train(
        self, seed: int, start: int = 0, sequences: SequenceNumbers = ALL, left_out: Sequence[int] = ()
    ) -> Batches:
        """Training batches from global step `start` on, without end: NumPy arrays `image`, float32 `batch height width
        channels`, `label`, int32 `batch`, and `weights`, float32 `batch`. Arguments are as of `Corpus.train`."""
        return self._batches("train", without(self._order(seed), left_out)[start:], sequences)

    def feed(self, context: FeedContext) -> Batches:
        """As of `Prepared`: `train`."""
        return self.train(context.seed, context.start, context.sequences, context.left_out)

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> Batches:
        """The first `batches` (None: all) of the held-out split, in a fixed order; the last is padded with weight 0."""
        if not len(self.splits["held_out"]):
            raise UserError("The held_out split is empty: Images.held_out is 0.")
        order = held_out_order(self.splits["held_out"], self.data.batch)
        return self._batches("held_out", order[:batches], sequences)

    def text_bytes(self, batch: Batch) -> None:
        """None: there is no text. As of `Corpus`."""

    def identity(self) -> dict[str, Any]:
        """`Images.identity()` and a digest of every picture and label: equal only where the batches are."""
        return self.data.identity() | {"digests": [self._digest]}

    @cached_property
    def _digest(self) -> str:
        return self.pictures.digest()

    def position(self, seed: int, step: int) -> str:
        """Where batch `step` comes from, for messages."""
        epoch = step * self.data.batch / len(self.splits["train"])
        shown = ", ".join(map(str, self._numbers(seed, step)[:16]))
        return f"batch {step} of seed {seed}: {self.data.source.name} (epoch {epoch:.2f}) pictures {shown}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        """Which pictures batch `step` is of, by their numbers in the source."""
        return [{"source": self.data.source.name, "pictures": self._numbers(seed, step)}]

    def _numbers(self, seed: int, step: int) -> list[int]:
        return self.splits["train"][np.asarray(self._order(seed)[step])].tolist()

    def _order(self, seed: int) -> grain.MapDataset:
        return shuffled_order(len(self.splits["train"]), self.data.batch, seed)

    def _batches(self, split: str, order: grain.MapDataset, mine: SequenceNumbers) -> Batches:
        def load(numbers: np.ndarray) -> list[Batch]:
            numbers = np.asarray(numbers)
            padded = np.pad(numbers, (0, self.data.batch - len(numbers)), constant_values=PADDING)[mine]
            return [read(self.pictures, self.splits[split], padded)]

        return Batches(order.map(load), self.data.threads)


def read(pictures: Pictures, split: np.ndarray, places: np.ndarray) -> Batch:
    """A batch of the pictures at these places of `split`; where one is `PADDING`, weight 0."""
    real = places != PADDING
    numbers = split[np.where(real, places, 0)]
    images = pictures.images[numbers]
    images = images[..., None] if images.ndim == 3 else images
    scaled = images.astype(np.float32)
    if images.dtype == np.uint8:
        scaled = scaled / 127.5 - 1
    return {"image": scaled, "label": pictures.labels[numbers].astype(np.int32), "weights": real.astype(np.float32)}
