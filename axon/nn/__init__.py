"""Modules that speak in named axes; Flax NNX holds their state."""

from axon.nn.activations import ACTIVATIONS, ClampedSwiGLU, check_activation, exact_gelu, gated, gelu
from axon.nn.attention import Attention
from axon.nn.auxiliary import Auxiliary
from axon.nn.cache import CacheSpec
from axon.nn.cross_attention import CrossAttention
from axon.nn.depth import Depth, Segment
from axon.nn.divergence import token_divergence, top_divergence
from axon.nn.dropout import Dropout
from axon.nn.embedding import Embedding
from axon.nn.head import Head
from axon.nn.inputs import Inputs
from axon.nn.language_model import LanguageModel
from axon.nn.latent_attention import LatentAttention
from axon.nn.layer_pattern import LayerPattern
from axon.nn.loss import cross_entropy, token_nll
from axon.nn.mlp import MLP, GatedMLP
from axon.nn.moe import MoE
from axon.nn.multi_token import MultiTokenBlock
from axon.nn.norm import LayerNorm, RMSNorm
from axon.nn.param import Dims, Param, ParamSpec, Variable, constant, fan_in, initialise, normal, parameters, variables
from axon.nn.relative_bias import RelativeBias
from axon.nn.rope import Rope
from axon.nn.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from axon.nn.router import Routing
from axon.nn.sequence_rows import SequenceRows
