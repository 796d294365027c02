"""Modules that speak in named axes; Flax NNX holds their state."""

from axon.nn.attention import Attention
from axon.nn.dropout import Dropout
from axon.nn.embedding import Embedding
from axon.nn.head import Head
from axon.nn.inputs import Inputs
from axon.nn.language_model import LanguageModel
from axon.nn.loss import cross_entropy, token_nll
from axon.nn.mlp import MLP, GatedMLP
from axon.nn.norm import LayerNorm, RMSNorm
from axon.nn.param import (
    Dims,
    Param,
    ParamSpec,
    Variable,
    constant,
    fan_in,
    initialise,
    normal,
    parameters,
    variables,
)
from axon.nn.rope import LinearScaling, Llama3Scaling, Rope
from axon.nn.stack import REMAT_NAMES, Stack

__all__ = [
    "MLP",
    "REMAT_NAMES",
    "Attention",
    "Dims",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "Head",
    "Inputs",
    "LanguageModel",
    "LayerNorm",
    "LinearScaling",
    "Llama3Scaling",
    "Param",
    "ParamSpec",
    "RMSNorm",
    "Rope",
    "Stack",
    "Variable",
    "constant",
    "cross_entropy",
    "fan_in",
    "initialise",
    "normal",
    "parameters",
    "token_nll",
    "variables",
]
