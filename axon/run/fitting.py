"""Whether data, objective and model of a run fit each other, checked before anything is trained."""

from axon.data import Prepared
from axon.run.tree import Train


def check_fits(train: Train, data: Prepared) -> None:
    """Raise `UserError` for a vocabulary without room for the tokens, or images of another shape than the model's."""
    data.check_fits(train.model, train.objective, train.seq)
