"""The loss curve."""

import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from axon.errors import UserError
from axon.observe.plot import plot_experts, plot_loss, smoothed


def records(steps: int = 40, every: int = 10) -> list[dict]:
    found: list[dict] = []
    for step in range(1, steps + 1):
        found.append({"step": step, "loss": 3 + 5 / step + random.gauss(0, 0.1)})
        if every and step % every == 0:
            loss = 3 + 5 / step
            found.append({"step": step, "eval_loss": loss, "eval_bits_per_byte": loss * 0.4})
    return found


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, to be looked into."""
    figures: list[Figure] = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k)))
    return figures


def test_the_picture_is_a_png_of_150_dots_per_inch(tmp_path):
    plot_loss(records(), tmp_path / "loss.png", "token")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1080, 630)


def test_axes_carry_units_and_bits_per_byte_stand_on_the_right(tmp_path, drawn):
    plot_loss(records(), tmp_path / "loss.png", "predicted token", "quickstart")
    (axes,) = drawn[0].axes
    (right,) = axes.child_axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per predicted token)")
    assert right.get_ylabel() == "bits per byte"
    assert right.get_ylim() == pytest.approx([0.4 * y for y in axes.get_ylim()])
    assert axes.get_title(loc="left") == "quickstart"


def test_what_is_drawn_is_what_was_measured(tmp_path, drawn):
    data = records()
    plot_loss(data, tmp_path / "loss.png", "token")
    lines = drawn[0].axes[0].get_lines()
    np.testing.assert_array_equal(lines[0].get_ydata(), [record["loss"] for record in data if "loss" in record])
    np.testing.assert_array_equal(lines[-1].get_xdata(), [10, 20, 30, 40])


def test_a_run_without_evaluations_has_no_right_axis(tmp_path, drawn):
    plot_loss(records(every=0), tmp_path / "loss.png", "token")
    assert not drawn[0].axes[0].child_axes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_very_short_runs_can_be_drawn(tmp_path, count):
    plot_loss(records(count), tmp_path / "loss.png", "token")


def test_records_without_a_number_are_passed_over(tmp_path):
    plot_loss([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"note": "x"}], tmp_path / "loss.png", "token")
    with pytest.raises(UserError, match="nothing to plot"):
        plot_loss([{"step": 2, "loss": None}], tmp_path / "loss.png", "token")


def test_smoothing_keeps_a_constant_and_lessens_noise(rng):
    assert smoothed(np.full(100, 2.5)) == pytest.approx(np.full(100, 2.5))
    noise = rng.normal(size=1000)
    assert smoothed(noise).std() < 0.5 * noise.std()


def test_drawing_leaves_pyplot_alone(tmp_path):
    script = (
        "import sys; from axon.observe.plot import plot_loss; "
        f"plot_loss([{{'step': 1, 'loss': 1.0}}], {str(tmp_path / 'loss.png')!r}, 'token'); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path.cwd())


def test_experts_have_a_plot_of_their_own_and_a_dense_model_has_none(tmp_path):
    plot_experts(records(), tmp_path / "dense.png")
    assert not (tmp_path / "dense.png").exists()
    routed = {"expert_load": 1.5, "expert_dropped": 0.0, "router_entropy": 1.2}
    plot_experts([{"step": step, "loss": 2.0} | routed for step in range(1, 9)], tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
