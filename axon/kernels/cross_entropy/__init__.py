"""Cross-entropy of a linear head over a vocabulary, with its gradients, the logits never all at once."""

from axon.kernels.cross_entropy.reference import cross_entropy_reference
from axon.kernels.cross_entropy.xla import Sums, cross_entropy, cross_entropy_and_gradients

__all__ = ["Sums", "cross_entropy", "cross_entropy_and_gradients", "cross_entropy_reference"]
