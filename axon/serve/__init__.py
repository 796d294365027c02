"""Inference with a trained model: the engine, which answers many requests at once, and what is built on it."""

from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.offline import Answer, answers
from axon.serve.replicas import Replicas
from axon.serve.request import Finish, Grammar, Request, Sampling, TokenLogprob, Update
from axon.serve.stats import Stats
