"""OLMo 2 and 3: norms after attention and MLP, QK norm over all heads; sliding windows in OLMo 3."""

from dataclasses import KW_ONLY, dataclass
from functools import partial

from jax.ad_checkpoint import checkpoint_name

from axon.foreign_json import FLAG, SIZE
from axon.kernels.attention import Causal, Mask, SameDocument, Window
from axon.nn import Attention, Auxiliary, GatedMLP, LayerPattern, Rope, Segment, check_activation, gated
from axon.nn.block import Block as AttentionBlock
from axon.nn.decoder import DecoderConfig
from axon.nn.hugging_face import EPS, Architecture, Field, Row, in_layers
from axon.nn.hugging_face_layers import local_layers
from axon.nn.hugging_face_rope import RopeRules, rope_field, two_ropes
from axon.nn.language_model import RESIDUAL
from axon.nn.sizes import check_sizes
from models.llama import ALL_FULL, BIASES, EMBEDDING, HEADS, MLP, NO_SLIDING_WINDOW, SILU, sizes

__all__ = ["HUGGING_FACE", "Olmo"]


@dataclass(frozen=True)
class Olmo(DecoderConfig):
    """Team OLMo, OLMo 2 (arXiv:2501.00656) and OLMo 3 (2512.13961).

    Args, besides those of `DecoderConfig`:
        window: keys that a query of a local layer sees (OLMo 3); None: every layer is a full one (OLMo 2).
        local_layers: local layers before each full one, where there is a window.
        local_rope, rope: frequencies of local and of full layers.
        bias: on queries, keys, values and the attention's output. activation: of the MLP's gate, by its name in
            `axon.nn.ACTIVATIONS`.
    """

    window: int | None = None
    local_layers: int = 3
    local_rope: Rope = Rope(500_000.0)
    rope: Rope = Rope(500_000.0)
    bias: bool = False
    activation: str = "silu"
    _: KW_ONLY
    norm_eps: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "window", "local_layers")
        check_activation(self)

    def segments(self) -> list[Segment]:
        """Full layers alone, or local layers between them."""
        seen = Causal() & SameDocument()
        full = partial(Block, self, seen, self.rope)
        if self.window is None:
            return [Segment(self.layers, block=full())]
        pattern = LayerPattern(self.layers, self.local_layers, "local", "full")
        return pattern.segments(partial(Block, self, seen & Window(self.window), self.local_rope), full)


class Block(AttentionBlock):
    """Attention and a gated MLP, each normalised before it is added to the residual stream."""

    def __init__(self, config: Olmo, mask: Mask, rope: Rope):
        dims = config.dims
        norm = config.norm
        attention = partial(Attention, dims, mask, rope=rope, bias=config.bias, out_bias=config.bias)
        self.attention = attention(qk_norm=lambda heads: norm(f"{heads} head_dim"))
        self.attention_norm = norm("embed")
        self.mlp = GatedMLP(dims, activation=gated(config.activation))
        self.mlp_norm = norm("embed")

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, cache = self.attention(x, inputs, cache)
        x = checkpoint_name(x + self.attention_norm(out, RESIDUAL), "residual")
        return x + self.mlp_norm(self.mlp(x), RESIDUAL), cache, Auxiliary()


ROWS = EMBEDDING + in_layers(
    (
        Row("self_attn.q_proj.weight", "attention/query", "(heads head_dim) embed"),
        Row("self_attn.k_proj.weight", "attention/key", "(kv_heads head_dim) embed"),
        Row("self_attn.v_proj.weight", "attention/value", "(kv_heads head_dim) embed"),
        Row("self_attn.o_proj.weight", "attention/out", "embed (heads head_dim)"),
        *BIASES,
        Row("self_attn.q_norm.weight", "attention/query_norm/scale", "(heads head_dim)"),
        Row("self_attn.k_norm.weight", "attention/key_norm/scale", "(kv_heads head_dim)"),
        Row("post_attention_layernorm.weight", "attention_norm/scale"),
        *MLP,
        Row("post_feedforward_layernorm.weight", "mlp_norm/scale"),
    )
)
FIELDS = (
    *sizes(50_304, 4096, 11_008, 32, 32, HEADS),
    Field("rms_norm_eps", "norm_eps", EPS, 1e-5),
    Field("tie_word_embeddings", "tied", FLAG, False),
    SILU,
    Field("attention_bias", "bias", FLAG, False),
)
OLMO2 = (
    *FIELDS,
    rope_field(RopeRules(), "rope", "local_rope"),
    NO_SLIDING_WINDOW,
    ALL_FULL,
)
OLMO3 = (
    *FIELDS,
    Field("sliding_window", "window", SIZE, 4096),
    local_layers(4),
    two_ropes(RopeRules(500_000.0, 500_000.0)),
)
HUGGING_FACE = (
    Architecture("Olmo2ForCausalLM", "olmo2", Olmo, ROWS, OLMO2, {"window": None, "local_layers": 3}),
    Architecture("Olmo3ForCausalLM", "olmo3", Olmo, ROWS, OLMO3),
)
