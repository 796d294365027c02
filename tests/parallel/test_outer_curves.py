"""Does an outer method learn as synchronous training does? The quickstart's model, narrowed, on two replicas."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import matplotlib
import pytest

from axon.config import load
from axon.data import Bpe
from axon.layout import Layout
from axon.observe.metrics import read_metrics
from axon.parallel.outer import DiLoCo, SlowMo
from axon.run import Train, run
from axon.train.optimizers import AdamW, Cosine, OneBitAdam

ROOT = Path(__file__).parents[2]
STEPS = 480
ROWS = 32
"""A replica clips and steps by its own half of a batch: with 4 rows that alone costs 2 % of the loss."""
SCHEDULE = Cosine(peak=5.66e-3, warmup=30, steps=STEPS)
"""The better of 5.66e-3 and 8e-3 for synchronous training."""
APART = AdamW(replace(SCHEDULE, peak=8e-3))
"""Replicas that train apart see half of the batch: Adam's steps are up to √2 times shorter, so their rate is larger."""

METHODS = {
    "synchronous": {},
    "DiLoCo": {"optimizer": APART, "outer": DiLoCo(every=5, learning_rate=0.9, momentum=0.1)},
    "SlowMo": {"optimizer": APART, "outer": SlowMo(every=5, learning_rate=0.9, momentum=0.1)},
    "1-bit Adam": {"optimizer": OneBitAdam(SCHEDULE, warmup=96)},
}


def quickstart() -> Train:
    """configs/quickstart.gin at half its width, depth and context, a fourth of its vocabulary, four times its batch.

    At full size four such runs would take hours on two cores.
    """
    tree = load(ROOT / "configs/quickstart.gin").tree
    return replace(
        tree,
        model=replace(tree.model, vocab=2048, embed=128, layers=2, mlp=352),
        data=replace(tree.data, seq=128, batch=ROWS, tokenizer=Bpe(vocab=2048)),
        optimizer=AdamW(SCHEDULE),
        layout=Layout({"replica": 2}),
        evaluation=replace(tree.evaluation, every=120),
        checkpoints=replace(tree.checkpoints, every=STEPS),
        steps=STEPS,
        sample=None,
    )


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Method → (tokens, held-out loss) after every evaluation."""
    folder = tmp_path_factory.mktemp("curves")
    devices, found = jax.devices()[:2], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        patch.setattr(jax, "device_count", lambda *_: 2)
        for name, changes in METHODS.items():
            place = folder / name.replace(" ", "_")
            run(replace(quickstart(), run_dir=str(place), **changes), report=lambda line: None)
            rows = read_metrics(place / "metrics.jsonl")
            tokens = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
            found[name] = [(tokens[row["step"]], row["eval_loss"]) for row in rows if "eval_loss" in row]
    _write(found, Path(os.environ.get("AXON_CURVES", folder)))
    return found


def _write(curves, folder: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    (folder / "curves.json").write_text(json.dumps(curves, indent=1))
    figure, plot = pyplot.subplots()
    for name, points in curves.items():
        plot.plot(*zip(*points, strict=True), label=f"{name}: {points[-1][1]:.3f}")
    plot.set(xlabel="tokens", ylabel="held-out loss, nats per token")
    plot.legend()
    figure.savefig(folder / "curves.png")
    pyplot.close(figure)
    print(f"curves: {folder}/curves.png")


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "synchronous"])
def test_the_held_out_loss_is_within_two_percent_of_synchronous_training_at_equal_tokens(method, curves):
    (tokens, loss), (same, synchronous) = curves[method][-1], curves["synchronous"][-1]
    assert tokens == same
    assert loss < curves["synchronous"][0][1], "it has learned something"
    assert loss <= 1.02 * synchronous
