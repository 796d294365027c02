"""The objective of a classifier of images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.errors import UserError
from axon.train.objective import Batch, Objective, Sums, sequences_of

IMAGE = ("batch", "height", "width", "channels")


@runtime_checkable
class Classifies(Protocol):
    """A module that this objective trains; `image_shape`: height, width and channels."""

    image_shape: tuple[int, int, int]
    classify: Callable[..., Any]


@dataclass(frozen=True)
class Classification(Objective):
    """The negative log-likelihood of an image's class, in nats; the metric `accuracy` is the share of images whose
    most likely class is theirs.

    Args:
        height, width, channels: of an image, as the model's.
        smoothing: the share of the label that is spread evenly over all classes (Szegedy et al., arXiv:1512.00567,
            section 7); `loss` is reported without it.
    """

    unit: ClassVar[str] = "image"

    height: int = 224
    width: int = 224
    channels: int = 3
    smoothing: float = 0.0

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "height", "width", "channels")
        check_range(self, "[0, 1)", "smoothing")

    def specs(self, batch: int, seq: int) -> Specs:
        """`image`, `label` of each, and `weights`, 0 for padding; `seq`, the model's positions, is in none of them."""
        image = ArraySpec(IMAGE, (batch, self.height, self.width, self.channels), jnp.float32)
        label, weights = (ArraySpec(("batch",), (batch,), dtype) for dtype in (jnp.int32, jnp.float32))
        return {"image": image, "label": label, "weights": weights}

    def check(self, module: Any) -> None:
        if not isinstance(module, Classifies):
            raise UserError(
                "Classification needs a model with classify, as models.vit.ViT builds one; build() returns a "
                f"{type(module).__name__}"
            )
        mine = self.height, self.width, self.channels
        if mine != module.image_shape:
            raise UserError(
                f"Classification: images of height, width and channels {mine}, and the model's are of "
                f"{module.image_shape}: set Classification.height, .width and .channels to these"
            )

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        """The batch with `positions`, how many the model makes of each image: what `tokens` counts."""
        return {**batch, "positions": module.seq * batch["weights"]}

    def counts(self, batch: Batch) -> dict[str, Array]:
        images = dict.fromkeys(("classification", "loss", "accuracy"), jnp.sum(batch["weights"]))
        return {"tokens": jnp.sum(batch["positions"])} | images

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        logits, auxiliary = module.classify(batch["image"], key, sequences_of(batch, key))
        logits = axes.shard(logits, "batch _classes")
        each, weights = jax.nn.log_softmax(logits), batch["weights"]
        own = jnp.arange(logits.shape[1]) == batch["label"][:, None]
        nll, even = -jnp.sum(jnp.where(own, each, 0), axis=1), -jnp.mean(each, axis=1)
        right = jnp.argmax(logits, axis=1) == batch["label"]
        loss = jnp.sum(weights * ((1 - self.smoothing) * nll + self.smoothing * even))
        reported = {"loss": jnp.sum(weights * nll), "accuracy": jnp.sum(weights * right)}
        return Sums({"classification": loss}, reported).with_auxiliary(auxiliary)
