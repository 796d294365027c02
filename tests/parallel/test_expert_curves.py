"""Does a mixture of experts learn more than the dense model of equal active parameters? The two quickstarts."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from axon.config import load
from axon.nn import parameters
from axon.observe.metrics import read_metrics
from axon.run import Train, run

ROOT = Path(__file__).parents[2]
STEPS = 200
CONFIGS = {"dense": "quickstart", "8 experts, 2 a token": "quickstart_moe"}
DENSE, EXPERTS = CONFIGS


def tree_of(config: str) -> Train:
    """A quickstart as it stands, its schedules too, for `STEPS` steps."""
    overrides = [f"STEPS={STEPS}", "Evaluation.every=50", f"Checkpoints.every={STEPS}"]
    return replace(load(ROOT / f"configs/{config}.gin", overrides).tree, sample=None)


def active_parameters(model: Any) -> tuple[int, int]:
    """How many one token goes through, without those of routers; and those."""
    routing = getattr(model, "routing", None)
    share = routing.top_k / routing.experts if routing else 1
    found = {"routers": 0.0, "others": 0.0}
    for path, spec in parameters(model.build()).items():
        kind = "routers" if "router" in path else "others"
        found[kind] += spec.size * (share if "mlp.expert" in spec.axes else 1)
    return int(found["others"]), int(found["routers"])


def test_a_token_goes_through_as_many_parameters_of_both():
    (dense, none), (experts, routers) = (active_parameters(tree_of(config).model) for config in CONFIGS.values())
    assert (dense, none) == (experts, 0)
    assert 0 < routers < 0.002 * dense


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Name of a model → the records of its run."""
    folder = tmp_path_factory.mktemp("curves")
    devices, found = jax.devices()[:1], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        patch.setattr(jax, "device_count", lambda *_: 1)
        for name, config in CONFIGS.items():
            run(replace(tree_of(config), run_dir=str(folder / config)), report=lambda line: None)
            found[name] = read_metrics(folder / config / "metrics.jsonl")
    draw(found, Path(os.environ.get("AXON_CURVES") or folder) / "experts.png")
    return found


def series(records: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    rows = [(record["step"], record[metric]) for record in records if metric in record]
    steps, values = zip(*rows, strict=True)
    return list(steps), list(values)


def draw(records: dict[str, list[dict[str, Any]]], path: Path, mean_of: int = 15) -> None:
    """Training losses, each the mean of `mean_of` steps, and losses of held-out text as points."""
    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, color in zip(records, ("#3b6fb6", "#d1495b"), strict=True):
        steps, losses = series(records[name], "loss")
        smooth = np.convolve(losses, np.ones(mean_of) / mean_of, "valid")
        axes.plot(steps[mean_of // 2 :][: len(smooth)], smooth, color=color, linewidth=1.4)
        steps, held_out = series(records[name], "eval_loss")
        axes.plot(steps, held_out, "o", color=color, label=f"{name}: {held_out[-1]:.3f} held out")
    axes.set(xlabel="step", ylabel="nats per token", ylim=(4, 6.5))
    axes.grid(True, color="#e3e5e8")
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"curves: {path}")


@pytest.mark.slow
def test_experts_reach_a_lower_loss_on_the_same_tokens(records):
    assert series(records[DENSE], "tokens") == series(records[EXPERTS], "tokens")
    (steps, dense), (same, experts) = (series(records[name], "eval_loss") for name in (DENSE, EXPERTS))
    assert steps == same
    assert steps[-1] == STEPS
    assert experts[-1] < dense[-1] < dense[0], "and both have learned something"
    last = {name: np.mean(series(records[name], "loss")[1][-40:]) for name in CONFIGS}
    assert last[EXPERTS] < last[DENSE]


@pytest.mark.slow
def test_no_expert_is_left_out_and_no_token_is_dropped(records):
    assert max(series(records[EXPERTS], "expert_dropped")[1]) == 0
    assert np.mean(series(records[EXPERTS], "expert_load")[1][-40:]) < 2, "of at most 4"
