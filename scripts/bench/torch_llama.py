"""The reference model and its training step in PyTorch, in its best native form: what Axon is measured against.

Only this module imports torch, so that the rest of the benchmarks need none.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

from axon.train.optimizers import AdamW
from models.llama import Llama

Batch = Mapping[str, np.ndarray]


class TorchLlama(nn.Module):
    """`models.llama.Llama` with one document a row, and no bias, QK norm or window."""

    def __init__(self, config: Llama):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, config.norm_eps)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.rope, self.width = config.rope, config.dims["head_dim"]

    def hidden(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The normalised output of the last block, `batch seq embed`; cos and sin are `seq head_dim/2`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        logits = self.head(self.hidden(tokens, cos, sin))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def angles(self, seq: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles of positions 0 to seq, `seq head_dim/2`."""
        frequencies = self.rope.theta ** (-np.arange(0, self.width, 2) / self.width)
        if self.rope.scaling is not None:
            frequencies = self.rope.scaling.apply(frequencies)
        angles = torch.from_numpy(np.outer(np.arange(seq), frequencies).astype(np.float32))
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class Block(nn.Module):
    """Attention and a gated MLP on the normalised residual stream."""

    def __init__(self, config: Llama):
        super().__init__()
        dims = config.dims
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, dims["head_dim"]
        self.attention_norm = nn.RMSNorm(config.embed, config.norm_eps)
        self.query = nn.Linear(config.embed, config.heads * self.width, bias=False)
        self.key = nn.Linear(config.embed, config.kv_heads * self.width, bias=False)
        self.value = nn.Linear(config.embed, config.kv_heads * self.width, bias=False)
        self.out = nn.Linear(config.heads * self.width, config.embed, bias=False)
        self.mlp_norm = nn.RMSNorm(config.embed, config.norm_eps)
        self.gate = nn.Linear(config.embed, config.mlp, bias=False)
        self.up = nn.Linear(config.embed, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            matrix(h).unflatten(-1, (heads, self.width)).transpose(1, 2)
            for matrix, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=grouped
        )
        x = x + self.out(out.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x[batch heads seq head_dim]` rotated, in pairs of its halves."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def copy_parameters(model: TorchLlama, parameters: Mapping[str, Any]) -> None:
    """Fill `model` with the parameters of a `Program`'s state (or a tree of the same shape)."""
    stacked, embed = parameters["layers"]["block"], model.embedding.embedding_dim
    _fill(model.embedding.weight, parameters["embedding"]["table"])
    if "head" in parameters:
        _fill(model.head.weight, np.asarray(parameters["head"]).T)
    _fill(model.norm.weight, parameters["norm"]["scale"])
    for i, block in enumerate(model.blocks):
        arrays = block.state_dict()  # it shares their memory
        for name in ("query", "key", "value"):
            _fill(arrays[f"{name}.weight"], np.asarray(stacked["attention"][name][i]).reshape(embed, -1).T)
        _fill(arrays["out.weight"], np.asarray(stacked["attention"]["out"][i]).reshape(-1, embed).T)
        for name in ("gate", "up", "down"):
            _fill(arrays[f"{name}.weight"], np.asarray(stacked["mlp"][name][i]).T)
        for name in ("attention_norm", "mlp_norm"):
            _fill(arrays[f"{name}.weight"], stacked[name]["scale"][i])


def _fill(target: Tensor, values: Any) -> None:
    with torch.no_grad():
        target.copy_(torch.tensor(np.asarray(values)))


class TorchStep:
    """A training step: forward, backward, clip by global norm, AdamW.

    Args:
        parameters: those of a `Program`'s state to start from; None for torch's own initial values.
        compiled: whether `torch.compile` makes one graph of the model, its backward included.
        device: "cpu" or "cuda". bfloat16: matrix products in bfloat16 by autocast, parameters in float32.
    """

    def __init__(
        self,
        config: Llama,
        parameters: Mapping[str, Any] | None,
        optimizer: AdamW,
        *,
        compiled: bool,
        device: str = "cpu",
        bfloat16: bool = False,
    ):
        self.model = TorchLlama(config)
        if parameters is not None:
            copy_parameters(self.model, parameters)
        self.model.to(device)
        self.device, self.bfloat16, self.clip = device, bfloat16, optimizer.clip
        self._forward: Callable[..., Tensor] = torch.compile(self.model) if compiled else self.model
        self._optimizer = _adamw(self.model, optimizer)

    def place(self, batch: Batch) -> tuple[Tensor, ...]:
        """A batch on the device: tokens and targets, and the rotary angles of its positions."""
        tokens, targets = (torch.from_numpy(batch[name]).long().to(self.device) for name in ("tokens", "targets"))
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        return tokens, targets, *self.model.angles(tokens.shape[1], self.device, dtype)

    def loss(self, placed: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a batch, to differentiate."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
            return self._forward(*placed)

    def __call__(self, placed: tuple[Tensor, ...]) -> float:
        """One step; its loss, in nats, so that all of the step is done on return."""
        loss = self.loss(placed)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return float(loss.detach())


def _adamw(model: TorchLlama, config: AdamW) -> torch.optim.Optimizer:
    """Fused: on a CPU and on a GPU the fastest of torch's implementations."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    rate = float(np.asarray(config.schedule.function()(0)))
    return torch.optim.AdamW(groups, lr=rate, betas=(config.b1, config.b2), eps=config.eps, fused=True)
