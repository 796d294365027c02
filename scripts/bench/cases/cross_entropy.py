"""The blocked cross-entropy at the shapes of training: Llama 3's head and the tokens of a v5e's share of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axon.kernels.cost import Cost
from axon.kernels.cross_entropy.xla import cross_entropy, cross_entropy_and_gradients, token_nll_gradients
from scripts.bench.case import Case

TOKENS, EMBED, VOCAB = 2048, 4096, 128256


def cases() -> list[Case]:
    """Loss alone and with its gradients; one device's part of a vocabulary that is split over eight, but for the maxima
    and sums over tokens that the devices would exchange; and the gradients of each token's loss."""
    whole, part = _operands(TOKENS, EMBED, VOCAB), _operands(TOKENS, EMBED, VOCAB // 8)
    by_token = (*whole, *whole[-1:] * 2)
    return [
        _case("with gradients", cross_entropy_and_gradients, whole, cost(*_sizes(VOCAB))),
        _case("loss alone", cross_entropy, whole, cost(*_sizes(VOCAB), products=1)),
        _case("an eighth of its vocabulary", cross_entropy_and_gradients, part, cost(*_sizes(VOCAB // 8))),
        _case("gradients of each token's loss", token_nll_gradients, by_token, cost(*_sizes(VOCAB))),
    ]


def _case(name: str, function: Callable[..., Any], operands: tuple[jax.ShapeDtypeStruct, ...], cost: Cost) -> Case:
    return Case("cross_entropy", f"Llama 3 8B, {name}", function, operands, cost)


def cost(tokens: int, embed: int, vocab: int, products: int = 3) -> Cost:
    """The products `x·head`, `dlogits·headᵀ` and `xᵀ·dlogits`; operands in bfloat16 read once for each, the head's
    gradient written in float32, and logits of a block neither written nor read."""
    gradients = 0 if products == 1 else tokens * embed * 2 + embed * vocab * 4
    return Cost(products * 2 * tokens * embed * vocab, products * (tokens + vocab) * embed * 2 + gradients)


def _sizes(vocab: int) -> tuple[int, int, int]:
    return TOKENS, EMBED, vocab


def _operands(tokens: int, embed: int, vocab: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        jax.ShapeDtypeStruct((tokens, embed), jnp.bfloat16),
        jax.ShapeDtypeStruct((embed, vocab), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
