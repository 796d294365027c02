"""A run: its configuration, its folder, and carrying it out."""

from axon.run.build import program
from axon.run.session import run
from axon.run.tree import Evaluation, Sample, Train

__all__ = ["Evaluation", "Sample", "Train", "program", "run"]
