"""Where images come from: files of arrays, or letters that are drawn."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from axon.checks import check_range
from axon.disk import check_paths, named, reading
from axon.errors import UserError
from axon.fields import FilePath

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral")
ARCHIVE = b"PK"
"""With which a zip file begins, as .npz is one, damaged or not."""
HASHED_BYTES = 2**24
"""Bytes of an array that are read at once for its digest."""


@dataclass(frozen=True)
class Pictures:
    """Images and the class of each.

    Attributes:
        images: `count height width channels`, or `count height width` of one channel; uint8 or floating-point.
        labels: integers from 0, `count`.
        images_from, labels_from: what the two are called in messages, as the names of their files.

    Raises `UserError` for arrays of another dtype or shape.
    """

    images: Any
    labels: Any
    images_from: str = "images"
    labels_from: str = "labels"

    def __post_init__(self):
        _check_images(self.images, self.images_from)
        _check_labels(self.labels, len(self.images), self.labels_from)

    def digest(self) -> str:
        """Of every value of both arrays, and of their dtypes and shapes. Reads all of them."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.images, self.labels):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            together = max(1, HASHED_BYTES // max(1, array[:1].nbytes))
            for start in range(0, len(array), together):
                digest.update(np.ascontiguousarray(array[start : start + together]))
        return digest.hexdigest()


def _check_images(images: Any, where: str) -> None:
    floating = np.issubdtype(images.dtype, np.floating)
    if images.ndim not in (3, 4) or not (images.dtype == np.uint8 or floating):
        raise UserError(
            f"{where}: images are {images.dtype} of shape {images.shape}; expected uint8 or floating-point, "
            "(count, height, width) or (count, height, width, channels). Convert the array, and save it anew"
        )


def _check_labels(labels: Any, images: int, where: str) -> None:
    if labels.shape != (images,) or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; expected one integer for each of the "
            f"{images} images. Convert the array, and save it anew"
        )
    if len(labels) and np.min(labels) < 0:
        raise UserError(
            f"{where}: the least label is {np.min(labels)}; expected classes numbered from 0. Renumber them"
        )


@runtime_checkable
class PictureSource(Protocol):
    """Images with labels. A source of your own is any dataclass with these two."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    def pictures(self) -> Pictures:
        """All of them, in the same order every time; arrays may be mapped from files."""
        ...


@dataclass(frozen=True)
class ArrayFiles:
    """Two files of NumPy's, `.npy`, as `Pictures` has them; they are mapped, and read as they are needed.

    uint8 in `images` is brought from 0 … 255 to -1 … 1, floating-point numbers are taken as they are.
    """

    images: FilePath
    labels: FilePath

    def __post_init__(self):
        check_paths(self)

    @property
    def name(self) -> str:
        return Path(self.images).absolute().stem

    def pictures(self) -> Pictures:
        images, labels = (named(path, "ArrayFiles") for path in (self.images, self.labels))
        return Pictures(_mapped(images), _mapped(labels), str(images), str(labels))


def _mapped(file: Path) -> np.ndarray:
    with reading(file), file.open("rb") as opened:
        begins = opened.read(len(MAGIC_PREFIX))
    if begins != MAGIC_PREFIX:
        raise _no_array(file, "an archive of arrays" if begins.startswith(ARCHIVE) else f"it begins with {begins}")
    try:
        return np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, TokenError) as error:  # what a damaged header raises
        raise _no_array(file, str(error)) from error


def _no_array(file: Path, why: str) -> UserError:
    return UserError(
        f"{file}: not an array of numbers ({why}); expected one, as numpy.save writes it. Save the images and the "
        "labels each to a .npy file of its own"
    )


@dataclass(frozen=True)
class Letters:
    """`count` pictures of capital letters, of `size` by `size` pixels: 26 classes, drawn by `seed` in fonts that come
    with Matplotlib, each turned, moved, scaled, and under noise. The same grey in all `channels`."""

    size: int = 16
    channels: int = 1
    count: int = 8192
    seed: int = 0

    def __post_init__(self):
        check_range(self, "[8, 4096]", "size")
        check_range(self, "[1, 2**31)", "channels", "count")
        check_range(self, "[0, inf)", "seed")

    @property
    def name(self) -> str:
        return "letters"

    def pictures(self) -> Pictures:
        random = np.random.default_rng(self.seed)
        fonts = _fonts(self.size)
        labels = random.integers(len(LETTERS), size=self.count)
        images = np.stack([_drawn(LETTERS[label], fonts, self.size, random) for label in labels])
        return Pictures(np.repeat(images[..., None], self.channels, axis=3), labels)


def _fonts(size: int) -> Sequence[Any]:
    """Each font in three heights."""
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    heights = [round(size * share) for share in (0.7, 0.8, 0.9)]
    return [ImageFont.truetype(str(folder / f"{font}.ttf"), height) for font in FONTS for height in heights]


def _drawn(letter: str, fonts: Sequence[Any], size: int, random: np.random.Generator) -> np.ndarray:
    """`height width` uint8: white on black, moved by at most an eighth of the size and turned by at most 15 degrees."""
    from PIL import Image, ImageDraw

    picture = Image.new("L", (size, size))
    place = size / 2 + random.uniform(-size / 8, size / 8, 2)
    font = fonts[int(random.integers(len(fonts)))]
    ImageDraw.Draw(picture).text(tuple(place), letter, fill=255, font=font, anchor="mm")
    turned = picture.rotate(random.uniform(-15, 15), resample=Image.Resampling.BILINEAR)
    noisy = np.asarray(turned, np.float32) + random.normal(0, 32, (size, size))
    return np.clip(noisy, 0, 255).astype(np.uint8)
