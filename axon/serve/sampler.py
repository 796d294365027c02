"""How the next tokens of a step are drawn, on the devices: what changes the logits, the draw, log-probabilities.

A row is a request at one position of its text. What its token is drawn by is its own: its seed, position, logits and
`Policy`; neither the other rows nor its place among them.

What the host makes of requests is in `policy.py`. What no row asks for is skipped, or is not in the program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.kernels.sampling import sample

LIKELIEST = 20
"""Tokens whose log-probabilities a row can ask for: the most that `Sampling.logprobs` allows."""

RULE = np.dtype(
    [
        *(("seed_high", "u4"), ("seed_low", "u4"), ("position", "i4"), ("temperature", "f4")),
        *(("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4")),
        *(("repetition", "f4"), ("presence", "f4"), ("frequency", "f4")),
        *(("logprobs", "i4"), ("scored_token", "i4")),
    ]
)
"""What a row is drawn by: see `Sampling`. `logprobs`: −1 for none. `scored_token`: see `Row`."""

ENTRY = ("row", "id", "bias", "count", "seen")
"""A logit that is changed: what is added to it (float32), how often the text has had the token, and 1 if prompt or text
has. A row beyond the last is padding's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleParams:
    """How the tokens of one step are drawn. Numbers are given as their bits: few arrays are the fastest to send.

    Args:
        rules: uint32 `rows rule`, each row a `RULE`.
        entries: uint32 `entries entry`, each an `ENTRY`, at most one of a token of a row. mask: uint32
            `rows ceil(vocab / 32)`, which ids may be drawn, the lowest bit the first. None, both: no row changes any.
    """

    rules: Any
    entries: Any = None
    mask: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleOutput:
    """What was drawn; log-probabilities are in nats, of the logits as they came, and 0 where no row of the step asks.

    Args:
        ids: int32 `rows`. valid: `rows`, False where the logits have a NaN or allow no token: the id means nothing.
        logprobs: float32 `rows`, of `ids`. scored_logprobs: float32 `rows`, of the rows' `scored_token`.
        top_ids, top_logprobs: `rows top`, the most likely ids, the most likely first, of those alike the first.
    """

    ids: Any
    valid: Any
    logprobs: Any
    scored_logprobs: Any
    top_ids: Any
    top_logprobs: Any


def draw(logits: Array, draws: SampleParams) -> SampleOutput:
    """A token for each row of `logits[rows vocab]` (float32, whole on each device), by the Gumbel-max trick.

    A row's noise is of the key fold_in(key(seed), position). Its logits are changed in the order of vLLM: penalties,
    bias, mask, then temperature and filters as in `axon.kernels.sampling.sample`. At temperature 0 it takes the first
    of the most likely.
    """
    whole = PartitionSpec()
    return axes.per_device(_draw, (whole, jax.tree.map(lambda _: whole, draws)), whole)(logits, draws)


def on_host(drawn: SampleOutput) -> SampleOutput:
    """The same on the host, once it is there; `ids` and `valid`, of which each is read on its own, as lists."""
    found: SampleOutput = jax.device_get(drawn)
    return replace(found, ids=found.ids.tolist(), valid=found.valid.tolist())


def _draw(logits: Array, draws: SampleParams) -> SampleOutput:
    rules, changed = _rules(draws.rules), logits
    if draws.entries is not None:
        changed = _adjusted(changed, rules, draws.entries)
        changed = jnp.where(_bits(draws.mask, logits.shape[1]), changed, -jnp.inf)
    filters = (rules[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    ids = sample(changed, _keys(rules), *filters)
    return SampleOutput(ids, jnp.isfinite(jnp.max(changed, axis=1)), *_logprobs(logits, ids, rules))


def _rules(packed: Array) -> dict[str, Array]:
    """By name the fields of `SampleParams.rules`."""
    fields = ((name, RULE[name]) for name in RULE.names or ())
    return {name: lax.bitcast_convert_type(packed[:, at], field) for at, (name, field) in enumerate(fields)}


def _keys(rules: Mapping[str, Array]) -> Array:
    """fold_in(key(seed), position) of each row. The words of a seed are a Threefry key's as they are: what
    `jax.random.key` makes of it, too, but without x64 that takes no seed of 64 bits."""
    words = jnp.stack([rules["seed_high"], rules["seed_low"]], axis=1)
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(words, impl="threefry2x32"), rules["position"])


def _adjusted(logits: Array, rules: Mapping[str, Array], entries: Array) -> Array:
    """Penalties and bias. Rows beyond the last are read as some row's, and not written."""
    row, token, bias, count, seen = entries.T
    repetition, presence, frequency = (rules[name][row] for name in ("repetition", "presence", "frequency"))
    found = logits[row, token]
    repeated = jnp.where(found > 0, found / repetition, found * repetition)
    found = jnp.where(seen > 0, repeated, found)
    found -= frequency * count + presence * (count > 0)
    return logits.at[row, token].set(found + lax.bitcast_convert_type(bias, jnp.float32), mode="drop")


def _bits(mask: Array, vocab: int) -> Array:
    """Booleans `rows vocab` of uint32 `rows words`."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(mask), -1)[:, :vocab] > 0


def _logprobs(logits: Array, ids: Array, rules: Mapping[str, Array]) -> tuple[Array, ...]:
    """Of the drawn tokens, the scored and the most likely; no work that no row asks for."""
    rows, most = len(logits), min(LIKELIEST, logits.shape[1])
    wanted, scored = rules["logprobs"], rules["scored_token"]

    def none() -> tuple[Array, Array]:
        return jnp.zeros((rows, most), jnp.int32), jnp.zeros((rows, most))

    def measured() -> tuple[Array, ...]:
        normalizer = jax.nn.logsumexp(logits, axis=1)[:, None]

        def top() -> tuple[Array, Array]:
            top, places = lax.top_k(logits, most)
            return places.astype(jnp.int32), top - normalizer

        two = jnp.take_along_axis(logits, jnp.stack([ids, jnp.maximum(scored, 0)], axis=1), axis=1) - normalizer
        return two[:, 0], two[:, 1], *lax.cond(jnp.any(wanted > 0), top, none)

    zeros = jnp.zeros(rows)
    return lax.cond(jnp.any(wanted >= 0), measured, lambda: (zeros, zeros, *none()))
