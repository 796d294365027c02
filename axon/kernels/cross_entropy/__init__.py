"""Cross-entropy of a linear head over a vocabulary, with its gradients, the logits never all at once."""

from axon.kernels.cross_entropy.columns import Columns
from axon.kernels.cross_entropy.divergence import (
    Divergence,
    Found,
    token_divergence,
    token_divergence_gradients,
    token_divergence_reference,
)
from axon.kernels.cross_entropy.reference import cross_entropy_reference, token_nll_reference
from axon.kernels.cross_entropy.teachers import HeadTeacher, Side, Teacher, TopTeacher
from axon.kernels.cross_entropy.xla import (
    Sums,
    cross_entropy,
    cross_entropy_and_gradients,
    token_nll,
    token_nll_gradients,
)
