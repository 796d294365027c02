"""Classification of images: its terms by hand, and a model or images that do not fit."""

from types import SimpleNamespace

import numpy as np
import pytest

from axon.errors import UserError
from axon.nn import Auxiliary
from axon.train.classification import Classification

LOGITS = np.array([[2.0, 0.0, -1.0], [0.5, 0.25, 0.0], [0.0, 3.0, 0.0]], np.float32)
BATCH = {
    "image": np.zeros((3, 4, 4, 1), np.float32),
    "label": np.array([0, 1, 2]),
    "weights": np.array([1.0, 1.0, 0.0], np.float32),
}
MODEL = SimpleNamespace(image_shape=(4, 4, 1), seq=5, classify=lambda images, key, sequences: (LOGITS, Auxiliary()))


def test_terms_are_sums_over_the_images_that_are_real():
    objective = Classification(4, 4, 1, smoothing=0.3)
    batch = objective.draw(MODEL, BATCH, None)
    sums, counts = objective.sums(MODEL, batch), objective.counts(batch)
    log = LOGITS - np.log(np.sum(np.exp(LOGITS), axis=1, keepdims=True))
    nll = -(log[0, 0] + log[1, 1])
    even = -np.mean(log[:2], axis=1).sum()
    np.testing.assert_allclose(sums.metrics["loss"], nll, rtol=1e-6)
    np.testing.assert_allclose(sums.minimised["classification"], 0.7 * nll + 0.3 * even, rtol=1e-6)
    assert sums.metrics["accuracy"] == 1
    assert {name: float(count) for name, count in counts.items()} == {
        "tokens": 10,
        "classification": 2,
        "loss": 2,
        "accuracy": 2,
    }


def test_a_model_of_text_or_of_other_images_is_refused():
    with pytest.raises(UserError, match=r"needs a model with classify, as models\.vit\.ViT"):
        Classification().check(SimpleNamespace())
    with pytest.raises(UserError, match=r"channels \(4, 4, 3\), and the model's are of \(4, 4, 1\)"):
        Classification(4, 4, 3).check(MODEL)
