"""The picture as an image."""

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from axon.errors import UserError
from axon.parallel.pipeline import DualPipeV, GPipe, ZeroBubbleV
from axon.parallel.pipeline.draw import draw


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, to be looked into."""
    figures: list[Figure] = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k)))
    return figures


def test_the_picture_is_a_png_with_a_box_for_every_cell(tmp_path, drawn):
    table = ZeroBubbleV().table(3, 4)
    draw(table, tmp_path / "new" / "schedule.png", title="ZB-V")
    assert (tmp_path / "new" / "schedule.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (axes,) = drawn[0].axes
    assert axes.get_title(loc="left") == "ZB-V"
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(boxes) == 3 * 4 * 2 * 3 + 3  # and the background of each stage


def test_every_stage_has_its_bubble_and_its_peak_stash(tmp_path, drawn):
    draw(GPipe().table(3, 4), tmp_path / "schedule.png")
    texts = [text.get_text() for text in drawn[0].axes[0].texts]
    assert texts.count("bubble 50.0%   peak stash 4") == 3


def test_colours_are_explained(tmp_path, drawn):
    draw(DualPipeV().table(2, 6), tmp_path / "schedule.png")
    words = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert words[:3] == ["forward, chunk 0", "forward, chunk 1", "backward, chunk 0"]


def test_a_format_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"unsupported image format '\.doc'"):
        draw(GPipe().table(2, 2), tmp_path / "schedule.doc")
