"""The picture as an image."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from axon.errors import UserError
from axon.parallel.pipeline import DualPipeV, GPipe, OneFOneB, ZeroBubbleV, lockstep
from axon.parallel.pipeline.draw import COLOURS, INK, Panel, draw
from axon.parallel.pipeline.rows import SlotBytes

SEEN_BY = {  # what is left of a colour: Machado et al. 2009, doi:10.1109/TVCG.2009.113, severity 1
    "most": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "those without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "those without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "those without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, to be looked into."""
    figures: list[Figure] = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k)))
    return figures


def test_the_picture_is_a_png_with_a_box_for_every_cell(tmp_path, drawn):
    table = ZeroBubbleV().table(3, 4)
    draw([Panel("ZB-V", table)], tmp_path / "new" / "schedule.png")
    assert (tmp_path / "new" / "schedule.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (axes,) = drawn[0].axes
    assert axes.get_title(loc="left") == "ZB-V"
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(boxes) == 3 * 4 * 2 * 3 + 3  # and the background of each stage


def test_every_stage_has_its_bubble_its_peak_stash_and_its_memory(tmp_path, drawn):
    draw(
        [Panel("one", GPipe().table(3, 4)), Panel("two", GPipe().table(2, 4), SlotBytes(1 << 20))],
        tmp_path / "schedule.png",
    )
    one, two = ([text.get_text() for text in axes.texts] for axes in drawn[0].axes)
    assert one.count("bubble 50.0%   peak stash 4") == 3
    assert two.count("bubble 25.0%   peak stash 4   4 MiB kept") == 2


def test_tables_below_each_other_have_the_same_axis_of_time(tmp_path, drawn):
    table = DualPipeV().table(2, 6)
    draw([Panel("by itself", table), Panel("in lockstep", lockstep(table))], tmp_path / "schedule.png")
    above, below = drawn[0].axes
    assert above.get_xlim() == below.get_xlim()


def test_colours_are_explained_and_the_legend_is_within_the_picture(tmp_path, drawn):
    draw([Panel("DualPipe-V", DualPipeV().table(2, 6))], tmp_path / "schedule.png")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward, chunks 0 and 1",
        "backward, chunks 0 and 1",
        "backward, inputs, chunks 0 and 1",
        "backward, weights, chunks 0 and 1",
        "idle",
    ]
    assert legend.get_window_extent().x1 < drawn[0].bbox.x1


def test_numbers_are_legible_or_left_out_of_all_boxes_of_a_kind(tmp_path, drawn):
    for microbatches, numbers in ((4, 2 * 4 * 2), (64, 2 * 64), (256, 0)):
        draw([Panel("", OneFOneB().table(2, microbatches))], tmp_path / "schedule.png")
        sizes = [text.get_fontsize() for text in drawn[-1].axes[0].texts if text.get_text().isdigit()]
        assert len(sizes) == numbers
        assert min(sizes, default=9) >= 5.5


def lightness_and_hue(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def linear(colour: str) -> np.ndarray:
    c = np.array(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_actions_and_neighbouring_chunks_are_told_apart(eyes):
    """A difference of 2.3 is just noticeable."""
    seen = {
        (action, chunk): lightness_and_hue(np.array(SEEN_BY[eyes]) @ linear(colour))
        for action, (_, colours) in COLOURS.items()
        for chunk, colour in enumerate(colours[:2])
    }
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 14, (one, other)


def test_numbers_can_be_read_on_every_colour():
    def brightness(colour: str) -> float:
        return float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05

    for _, colours in COLOURS.values():
        assert min(brightness(colour) for colour in colours) / brightness(INK) > 4.5


def test_a_format_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"unsupported image format '\.doc'"):
        draw([Panel("", GPipe().table(2, 2))], tmp_path / "schedule.doc")
