"""A run: its configuration, its folder, and carrying it out."""

from axon.run.adapter import PeftLoRA
from axon.run.build import placed, program
from axon.run.hub import Hub, HubTokenizer
from axon.run.init_from import InitFrom
from axon.run.planned import Planned
from axon.run.serving import Serve, serving_program
from axon.run.session import run
from axon.run.tree import Evaluation, Reference, Sample, Train
from axon.train.faults import Faults, Spikes
