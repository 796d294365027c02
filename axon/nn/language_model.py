"""A decoder-only language model: embedding, depth, norm, head."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from flax import nnx
from jax import Array

from axon.nn.auxiliary import Auxiliary
from axon.nn.block import RESIDUAL
from axon.nn.depth import Depth
from axon.nn.embedding import Embedding
from axon.nn.flops import forward_flops, is_trained, paths_in, training_flops, weight_flops
from axon.nn.head import Head
from axon.nn.inputs import Inputs
from axon.nn.multi_token import MultiTokenBlock
from axon.nn.param import Dims, Param, parameters


class LanguageModel(nnx.Module):
    """Token ids in, a distribution over the next id out.

    Args:
        dims: sizes of vocab and embed, and of what else its parts name.
        depth: the blocks. norm: the last one. tied: whether the head is the embedding's table.
        embedding_stddev: of initial values, 1 / √embed by default.
        vocab: how many ids there are, where `dims` has more: those beyond are never predicted and never counted.
        soft_cap: of the logits, see `axon.nn.head.Head`.
        mtp: makes of the last layer's output that from which the token after the next is predicted, by the same head;
            the objective `MultiToken` trains it.
    """

    max_length: int | None = None
    """How many positions a sequence may have, a prompt and the text after it; None for any number."""

    start_id: int | None = None
    """What a text begins with that answers a prompt; None: it goes on from the prompt."""

    predicts_tokens: bool = True
    """Whether `output` is used; else what is made of the last hidden state is made by a part that was put on top."""

    on_top: tuple[str, ...] = ()
    """Names of the parts that a config of `axon.tune` put on the last hidden state."""

    replaced: tuple[str, ...] = ()
    """Paths of a language model's parameters in whose place these parts are: none is taken from one."""

    def __init__(
        self,
        dims: Dims,
        depth: Depth,
        norm: nnx.Module,
        *,
        tied: bool,
        embedding_stddev: float | None = None,
        vocab: int | None = None,
        soft_cap: float | None = None,
        mtp: MultiTokenBlock | None = None,
    ):
        self.embedding = Embedding("vocab", dims, embedding_stddev or dims["embed"] ** -0.5)
        self.layers = depth
        self.norm = norm
        if not tied:
            self.head = Param("embed vocab", dims)
        if mtp is not None:
            self.mtp = mtp
        self.tied, self.dims, self.soft_cap = tied, dict(dims), soft_cap
        self.has_mtp, self.num_layers = mtp is not None, depth.num_layers
        self.vocab = None if vocab == dims["vocab"] else vocab
        scalings = [rope.scaling for rope, _ in depth.all_ropes if rope.scaling is not None]
        self.max_length = min((one.longest for one in scalings if one.longest is not None), default=None)

    def embed(self, inputs: Inputs) -> Array:
        """`batch seq.residual embed`: where the residual stream begins."""
        return self.embedding(inputs.tokens)

    def hidden(self, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Auxiliary]:
        """The last layer's normalised output, `batch seq.residual embed`, the cache, and the layers' auxiliary terms.

        `cache`, of `self.cache(…)`, comes back with the tokens of `inputs` in it.
        """
        x, cache, auxiliary = self.layers(self.embed(inputs), inputs, cache)
        return self.norm(x, RESIDUAL), cache, auxiliary.within("layers")

    def mtp_hidden(
        self, hidden: Array, inputs: Inputs, following: Array, cache: Any = None
    ) -> tuple[Array, Any, Auxiliary]:
        """What `output` predicts the token after the next from, `batch seq.residual embed`; the cache of the block that
        makes it, if there is one; and its auxiliary terms.

        `hidden`: what `hidden` gave for these `inputs`; `following[batch seq]`: the id after each of their tokens.
        """
        embedded = self.embed(replace(inputs, tokens=following))
        x, cache, auxiliary = self.mtp(hidden, embedded, inputs.in_layer(self.num_layers), cache)
        return x, cache, auxiliary.within("mtp")

    @property
    def output(self) -> Head:
        """The module that makes logits of `hidden`."""
        return Head(self.embedding.table if self.tied else self.head, self.vocab, self.soft_cap)

    def cache(self, batch: int, length: int) -> dict[str, dict[str, Array]]:
        """An empty cache for `length` tokens of each sequence: of each kind of block, what its blocks declare."""
        return self.layers.cache(batch, length)

    def flops_per_token(self, seq: int, frozen: Collection[str] = ()) -> int:
        """Model FLOPs of training on one token in a sequence of `seq`, forward and backward (see `axon.observe.mfu`),
        where the parameters with the `frozen` paths are not trained.

        What remat repeats does not count, nor a look-up in a table.
        """
        others = ("layers/", "norm/", "head", "mtp/", *self.on_top)
        embedded = any(not path.startswith(others) and path not in frozen for path in parameters(self))
        total, below = self.layers.training_flops(seq, paths_in("layers", frozen), embedded)
        below = below or is_trained(self.norm, paths_in("norm", frozen))
        beside = [(name, part) for name in self.on_top if hasattr(part := getattr(self, name), "flops_per_token")]
        total += sum(part.flops_per_token(seq, paths_in(name, frozen)) for name, part in beside)
        if not self.predicts_tokens:
            return total
        head = self.flops_by_part(seq)["head"]
        own = 0 if ("embedding/table" if self.tied else "head") in frozen else head
        total += head + own + (head if below else 0)
        if self.has_mtp:
            still, below = paths_in("mtp", frozen), below or embedded
            total += training_flops(self.mtp, seq, still, below) + head + own
            total += head if below or is_trained(self.mtp, still) else 0
        return total

    def flops_by_part(self, seq: int) -> dict[str, int]:
        """FLOPs of one token's forward: of the `layers`, of the `head`, and of the block `mtp`, without its head."""
        head = weight_flops(self.output.matrix)
        mtp = forward_flops(self.mtp, seq) if self.has_mtp else 0
        return {"layers": self.layers.flops(seq), "head": head, "mtp": mtp}
