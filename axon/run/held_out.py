"""Evaluation of a run: the loss of its objective on held-out data, of text or of images."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axon.data import Prepared
from axon.errors import UserError
from axon.train.by_adapter import ACCURACY, LOSS
from axon.train.evaluate import Evaluator
from axon.train.objective import TOKEN


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss on held-out data, in nats per `unit`.

    Attributes:
        unit: what the loss is the mean over, see `axon.train.objective.Objective`. count: how many of them there were.
        bits_per_byte: of the text; None for images, and where not every token is predicted.
        others: the means of the objective's other metrics, as `accuracy`, `margin` or `divergence`; of several adapters
            that are trained at once also `loss/NAME`, and `accuracy/NAME`, of each on its own data.
    """

    loss: float
    unit: str
    count: int
    bits_per_byte: float | None = None
    others: Mapping[str, float] = field(default_factory=dict, hash=False)

    def metrics(self) -> dict[str, float]:
        """By name, the numbers that there are."""
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss} | bits | dict(self.others)

    def __str__(self):
        parts = [f"loss {self.loss:.4f} nats per {self.unit}"]
        parts += [] if self.bits_per_byte is None else [f"{self.bits_per_byte:.4f} bits per byte"]
        parts += [f"{name} {value:.4f}" for name, value in self.others.items() if not name.startswith((LOSS, ACCURACY))]
        parts += [self._of_adapter(name.removeprefix(LOSS)) for name in self.others if name.startswith(LOSS)]
        return ", ".join([*parts, f"over {self.count:,} {self.unit}{'s' * (self.count != 1)}"])

    def _of_adapter(self, name: str) -> str:
        accuracy = self.others.get(ACCURACY + name)
        more = "" if accuracy is None else f" (accuracy {accuracy:.4f})"
        return f"{name} {self.others[LOSS + name]:.4f}{more}"


def held_out_loss(
    evaluator: Evaluator, data: Prepared, parameters: Any, variables: Any, batches: int | None
) -> HeldOutLoss:
    """The evaluator's loss on the first `batches` of the held-out split, None for all.

    Raises `UserError` where it is not finite, or where there is nothing to predict.
    """
    totals, size = defaultdict[str, np.ndarray](lambda: np.zeros(2)), 0.0
    total_of = jax.jit(jnp.sum)
    with data.held_out(batches, evaluator.host_sequences) as held_out:
        for batch in held_out:
            found = jax.device_get(evaluator(parameters, evaluator.place(batch), variables))
            for name, pair in found.items():
                totals[name] += np.asarray(pair, np.float64)
            lengths = data.text_bytes(batch)
            if lengths is not None and evaluator.unit == TOKEN:
                size += float(total_of(evaluator.place({"weights": lengths})["weights"]))  # over all processes
    nats, count = totals.pop("loss").tolist()
    if not count:
        raise UserError(
            f"the held-out data have nothing to predict: the loss would be the mean over no {evaluator.unit}"
        )
    if not math.isfinite(nats):
        raise UserError(
            f"the loss on held-out data is {nats}: these parameters are damaged, or training had already diverged when "
            "they were saved. Evaluate an earlier checkpoint"
        )
    bits = nats / math.log(2) / size if size else None
    others = {name: total / of for name, (total, of) in sorted(totals.items()) if of}
    return HeldOutLoss(nats / count, evaluator.unit, round(count), bits, others)
