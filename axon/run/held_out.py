"""What an evaluation gives, of text or of images; and the evaluation of images."""

import math
from typing import Any, NamedTuple

import jax

from axon.data import Prepared
from axon.errors import UserError
from axon.train.evaluate import Evaluator


class TextLoss(NamedTuple):
    """Loss on held-out text: nats per token, and bits per byte of the text; None where not every token is predicted."""

    loss: float
    bits_per_byte: float | None

    def __str__(self):
        if self.bits_per_byte is None:
            return f"loss {self.loss:.4f} nats per predicted token"
        return f"loss {self.loss:.4f} nats per token, {self.bits_per_byte:.4f} bits per byte"


class ImageLoss(NamedTuple):
    """Loss on held-out images: nats per image, and the share whose likeliest class is theirs."""

    loss: float
    accuracy: float

    def __str__(self):
        return f"loss {self.loss:.4f} nats per image, accuracy {self.accuracy:.4f}"


def held_out_images(
    evaluator: Evaluator, gallery: Prepared, parameters: Any, variables: Any, batches: int | None
) -> ImageLoss:
    """Loss and accuracy on held-out images, by an objective that reports both, as `Classification`."""
    nats = right = images = 0.0
    with gallery.held_out(batches, evaluator.host_sequences) as held_out:
        for batch in held_out:
            found = jax.device_get(evaluator(parameters, evaluator.place(batch), variables))
            nats, images = nats + float(found["loss"][0]), images + float(found["loss"][1])
            right += float(found["accuracy"][0])
    if not math.isfinite(nats):
        raise UserError(
            f"the loss on held-out images is {nats}: these parameters are damaged, or training had already diverged "
            "when they were saved. Evaluate an earlier checkpoint"
        )
    return ImageLoss(nats / images, right / images)
