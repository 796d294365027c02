"""Where images come from: files of arrays, or letters that are drawn."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from axon.checks import check_range
from axon.data.records import files_key, fingerprint
from axon.disk import named, reading
from axon.errors import UserError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral")


class Pictures(NamedTuple):
    """Images and the class of each: `images` is `count height width channels`, or `count height width` of one channel,
    uint8 or floating-point; `labels` are integers, `count`."""

    images: Any
    labels: Any


@runtime_checkable
class PictureSource(Protocol):
    """Images with labels. A source of your own is any dataclass with these three."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def key(self) -> str:
        """Changes when the pictures change, as far as that shows without reading them."""
        ...

    def pictures(self) -> Pictures:
        """All of them, in the same order every time; arrays may be mapped from files."""
        ...


@dataclass(frozen=True)
class ArrayFiles:
    """Two files of NumPy's, `.npy`, as `Pictures` has them; they are mapped, and read as they are needed.

    uint8 in `images` is brought from 0 … 255 to -1 … 1, floating-point numbers are taken as they are.
    """

    images: str
    labels: str

    def __post_init__(self):
        named(self.images, "ArrayFiles.images")
        named(self.labels, "ArrayFiles.labels")

    @property
    def name(self) -> str:
        return Path(self.images).expanduser().absolute().stem

    def key(self) -> str:
        return fingerprint("arrays", *(files_key(path, "*") for path in (self.images, self.labels)))

    def pictures(self) -> Pictures:
        return Pictures(_mapped(self.images), _mapped(self.labels))


def _mapped(path: str) -> np.ndarray:
    file = named(path, "ArrayFiles")
    with reading(file):
        file.stat()
    try:
        return np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{file}: not an array that numpy.save wrote ({error}); give a .npy file") from error


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

    def key(self) -> str:
        import matplotlib
        import PIL

        return fingerprint("letters", asdict(self), matplotlib.__version__, PIL.__version__)

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
