"""ViT: an encoder of an image's patches, which says of which class the image is."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import Array

from axon.axes import add, by_sequence, current, einsum, shard
from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values
from axon.foreign_json import NULL, OBJECT, SIZE, one_of
from axon.kernels.attention import Everything
from axon.nn import (
    ACTIVATIONS,
    MLP,
    Attention,
    Auxiliary,
    Depth,
    Dropout,
    Embedding,
    Inputs,
    LayerNorm,
    Param,
    Segment,
    check_activation,
    constant,
    fan_in,
    normal,
)
from axon.nn.flops import paths_in
from axon.nn.hugging_face import EPS, LAYERS, RATE, Architecture, Constant, Converted, Field, Row, ignored, in_layers
from axon.nn.language_model import RESIDUAL
from axon.nn.param import parameters
from axon.nn.sizes import check_sizes
from models.bert import linear_rows, norm_rows

__all__ = ["HUGGING_FACE", "ViT"]

PATCH = "channels patch_height patch_width"


@dataclass(frozen=True)
class ViT:
    """Dosovitskiy et al. (arXiv:2010.11929). Train it by `Classification`, on `Images`.

    Args:
        image: height and width of an image; patch: of a patch, in pixels; channels: numbers a pixel.
        embed, layers, heads, mlp: sizes. classes: how many there are.
        pool: what the head sees: the last state of a `token` of its own, the first of the sequence, or the `mean` of
            the patches' (Zhai et al., arXiv:2106.04560, section 3.4), which leaves as many positions as patches.
        norm_eps: of LayerNorm. activation: of the MLP, by its name in `axon.nn.ACTIVATIONS`.
        dropout: fraction of activations dropped after the embedding and after each half of a
            block, in training.
    """

    image: int = 224
    patch: int = 16
    channels: int = 3
    embed: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    classes: int = 1000
    pool: Literal["token", "mean"] = "token"
    norm_eps: float = 1e-12
    activation: str = "gelu"
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "image", "patch", "channels", "embed", "layers", "heads", "mlp")
        check_range(self, "[2, 2**31)", "classes")
        check_range(self, "[0, 1)", "dropout")
        check_activation(self)
        if self.pool not in ("token", "mean"):
            raise UserError(f"ViT.pool is {self.pool!r}; must be 'token' or 'mean'")
        if self.image % self.patch:
            raise UserError(f"ViT: image {self.image} is not divisible by patch {self.patch}")
        if self.embed % self.heads:
            raise UserError(f"ViT: embed {self.embed} is not divisible by heads {self.heads}")

    @property
    def seq(self) -> int:
        """Positions of an image: its patches, and the token of the class."""
        return (self.image // self.patch) ** 2 + (self.pool == "token")

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named axes."""
        sizes = field_values(self, ("channels", "embed", "heads", "mlp", "classes"))
        own = {"kv_heads": self.heads, "head_dim": self.embed // self.heads, "positions": self.seq}
        return sizes | own | {"patch_height": self.patch, "patch_width": self.patch}

    def build(self) -> "ViTModel":
        """The module, its parameters not yet initialised."""
        return ViTModel(self)


class ViTModel(nnx.Module):
    """Images in, a distribution over classes out."""

    def __init__(self, config: ViT):
        dims = config.dims
        self.patches = Param(f"{PATCH} embed", dims, fan_in(PATCH))
        self.patches_bias = Param("embed", dims, constant(0.0))
        if config.pool == "token":
            self.token = Param("embed", dims, constant(0.0))
        self.positions = Embedding("positions", dims, 0.02)
        self.dropout = Dropout(config.dropout, "embedding")
        self.layers = Depth(Segment(config.layers, block=Block(config)))
        self.norm = LayerNorm("embed", dims, config.norm_eps)
        self.head, self.head_bias = Param("embed classes", dims, normal(0.02)), Param("classes", dims, constant(0.0))
        self.dims, self.seq, self.has_token = dims, config.seq, config.pool == "token"
        self.image_shape = (config.image, config.image, config.channels)

    def classify(
        self, images: Array, key: Array | None = None, sequences: Array | None = None
    ) -> tuple[Array, Auxiliary]:
        """Logits of `images[batch height width channels]`, `batch classes` float32, and the layers' auxiliary terms.

        `key`, `sequences`: of dropout, see `axon.nn.Inputs`.
        """
        scope = current()
        stored = np.arange(self.seq) if scope is None else scope.placement.stored_positions(self.seq)
        places = shard(jnp.broadcast_to(jnp.asarray(stored, jnp.int32), (len(images), self.seq)), "batch seq")
        inputs = Inputs(places, places, key=key, sequences=sequences)  # blocks look at no tokens
        x = shard(self._embed(images)[:, stored], RESIDUAL)
        x = self.dropout(x + self.positions(places), inputs)
        x, _, auxiliary = self.layers(x, inputs)
        x = shard(self.norm(x, RESIDUAL), "batch _seq embed")
        pooled = (
            x[:, int(np.argmin(stored))] if self.has_token else jnp.mean(x, axis=1, dtype=jnp.float32).astype(x.dtype)
        )
        logits = einsum("batch embed, embed classes -> batch classes", pooled, self.head)
        logits = add("batch classes, classes -> batch classes", logits, self.head_bias)
        return logits.astype(jnp.float32), auxiliary.within("layers")

    def _embed(self, images: Array) -> Array:
        """`batch _seq embed` of `images[batch height width channels]`: a projection of each patch."""
        _, height, width, _ = self.patches.get_value().shape
        cut = "batch (rows height) (columns width) channels -> batch (rows columns) channels height width"
        patches = by_sequence(lambda x: rearrange(x, cut, height=height, width=width), images)
        x = einsum(f"batch _patches {PATCH}, {PATCH} embed -> batch _patches embed", patches, self.patches)
        x = add("batch _patches embed, embed -> batch _patches embed", x, self.patches_bias)
        if self.has_token:
            # In the shape of a position: a parameter is added, so that its gradient is summed as a weight's is.
            first = add("batch _patches embed, embed -> batch _patches embed", jnp.zeros_like(x[:, :1]), self.token)
            x = jnp.concatenate([first, x], axis=1)
        return x

    def flops_per_token(self, seq: int, frozen: Collection[str] = ()) -> int:
        """Model FLOPs of training on one position of the sequence of `seq` that an image is, forward and backward: of
        the layers, and the patch's projection, which needs no gradient of pixels. The head's are left out."""
        below = any(not path.startswith("layers/") and path not in frozen for path in parameters(self))
        layers, _ = self.layers.training_flops(seq, paths_in("layers", frozen), below)
        return layers + (2 if "patches" in frozen else 4) * self.patches.get_value().size


class Block(nnx.Module):
    """Attention among all patches and an MLP, each of the normalised stream and added to it."""

    def __init__(self, config: ViT):
        dims = config.dims
        self.attention_norm = LayerNorm("embed", dims, config.norm_eps)
        self.attention = Attention(dims, Everything(), bias=True, out_bias=True)
        self.mlp_norm = LayerNorm("embed", dims, config.norm_eps)
        self.mlp = MLP(dims, activation=ACTIVATIONS[config.activation])
        self.attention_dropout = Dropout(config.dropout, "attention")
        self.mlp_dropout = Dropout(config.dropout, "mlp")

    def __call__(self, x, inputs, cache=None):  # batch seq.residual embed
        out, _ = self.attention(self.attention_norm(x, RESIDUAL), inputs)
        x = x + self.attention_dropout(out, inputs)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x, RESIDUAL)), inputs), cache, Auxiliary()


def _heads(theirs: str, ours: str, heads: str) -> tuple[Row, Row]:
    return linear_rows(theirs, ours, f"({heads} head_dim) embed", f"({heads} head_dim)")


ROWS = (
    Row("vit.embeddings.cls_token", "token", "1 1 embed"),
    Row("vit.embeddings.position_embeddings", "positions/table", "1 positions embed"),
    *linear_rows("vit.embeddings.patch_embeddings.projection", "patches", f"embed {PATCH}", "embed"),
    *norm_rows("vit.layernorm", "norm"),
    *linear_rows("classifier", "head", "classes embed", "classes"),
    *in_layers(
        (
            *norm_rows("layernorm_before", "attention_norm"),
            *_heads("attention.attention.query", "attention/query", "heads"),
            *_heads("attention.attention.key", "attention/key", "kv_heads"),
            *_heads("attention.attention.value", "attention/value", "kv_heads"),
            *linear_rows("attention.output.dense", "attention/out", "embed (heads head_dim)", "embed"),
            *norm_rows("layernorm_after", "mlp_norm"),
            *linear_rows("intermediate.dense", "mlp/up", "mlp embed", "mlp"),
            *linear_rows("output.dense", "mlp/down", "embed mlp", "embed"),
        ),
        "vit.encoder.layer.{layer}",
    ),
)


def _read_classes(config: Mapping[str, Any]) -> dict[str, int]:
    """A config.json has a name for each class, or says how many there are; of one that says neither there are two."""
    names = config.get("id2label")
    if (count := (config.get("num_labels") or 2) if names is None else len(names)) < 2:
        raise UserError(f"config.json: id2label or num_labels says that there are {count} classes; must be at least 2")
    return {"classes": count}


def _write_classes(model: ViT) -> dict[str, dict]:
    names = {str(number): f"LABEL_{number}" for number in range(model.classes)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


def _read_width(config: Mapping[str, Any]) -> dict[str, Any]:
    if (width := config.get("head_dim")) not in (None, config["hidden_size"] // config["num_attention_heads"]):
        raise UserError(f"config.json: head_dim is {width}; must be hidden_size / num_attention_heads")
    return {}


FIELDS = (
    Field("image_size", "image", SIZE, 224),
    Field("patch_size", "patch", SIZE, 16),
    Field("num_channels", "channels", SIZE, 3),
    Field("hidden_size", "embed", SIZE, 768),
    Field("num_hidden_layers", "layers", LAYERS, 12),
    Field("num_attention_heads", "heads", SIZE, 12),
    Field("intermediate_size", "mlp", SIZE, 3072),
    Field("layer_norm_eps", "norm_eps", EPS, 1e-12),
    Field("hidden_dropout_prob", "dropout", RATE, 0.0),
    Converted(
        _read_classes,
        _write_classes,
        {"id2label": OBJECT | NULL, "label2id": OBJECT | NULL, "num_labels": SIZE | NULL},
    ),
    Converted(_read_width, lambda model: {}, {"head_dim": SIZE | NULL}),
    Field("hidden_act", "activation", one_of(*ACTIVATIONS), "gelu"),
    Constant("qkv_bias", True),
    *ignored("attention_probs_dropout_prob", "encoder_stride", "pooler_act", "pooler_output_size"),
)
HUGGING_FACE = (
    Architecture(
        "ViTForImageClassification",
        "vit",
        ViT,
        ROWS,
        FIELDS,
        fixed={"pool": "token"},
        copies=(),
        unused=("vit.pooler.*",),
    ),
)
