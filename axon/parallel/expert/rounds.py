"""A layer of experts on its devices: dispatch, their products, combine, in as many rounds as the load needs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import MAX, HostWeight, Report, Stored, as_cotangent, like_operand, per_device, reshard
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.exchange import Exchange
from axon.parallel.expert.local import Local
from axon.parallel.expert.padded import Padded
from axon.parallel.expert.product import Products
from axon.parallel.expert.ragged import Ragged
from axon.parallel.expert.sent_rows import SentRows
from axon.parallel.pipeline.region import PIPE, in_stage
from axon.precision.formats import Format

OVERFLOW_ROUNDS = "overflow_rounds"
"""The named scope of the loop that a load within capacity never enters: `axon.plan` counts it as nothing."""

Experts = Callable[[Products, Sequence[Stored | Report], Array | SentRows, Array], Array]
"""(products, matrices and biases, `copies rows embed`, each row's weight) → `copies rows embed`."""


class Tokens(NamedTuple):
    """What of tokens has no gradient: `chosen` and `own_ranks` as of `through_experts`."""

    chosen: Array
    own_ranks: Array | None


def through_experts(
    mesh: ExpertMesh,
    way: Local | Padded | Ragged,
    experts: Experts,
    matrices: Sequence[Stored | Report],
    x: Array,
    chosen: Array,
    weights: Array,
    out: PartitionSpec,
    form: Format | None,
    own_ranks: Array | None = None,
) -> Array:
    """`x[batch seq embed]` through the experts of `chosen[batch seq k]`, those of a token added up, under `out`.

    Args:
        chosen: the experts of each token, -1 for none. weights: of each, `batch seq k`. form: the format in which
            rows are sent, see `axon.parallel.expert.product.sent_format`. own_ranks: of each token, `batch seq rank`,
            as of `Products`.

    The first round takes what fits, which is all of a load within capacity. What is left takes overflow rounds, as
    many as there is work for on any device, of any stage of a pipeline; their backward computes them again, so that
    nothing is stored for them.
    """

    def round(number: Array, tokens: Tokens, x: Array, weights: Array, matrices: Sequence[Stored]) -> Array:
        exchange = Exchange.of_round(mesh, way, tokens.chosen, number)
        rows, of_rows = exchange.dispatch(x.astype(mesh.scope.compute), weights, form)
        own = None if tokens.own_ranks is None else exchange.sent(tokens.own_ranks)
        return exchange.combine(experts(Products(mesh, exchange.plan.sizes, own), matrices, rows, of_rows), out)

    tokens = Tokens(chosen, None if own_ranks is None else own_ranks.astype(mesh.scope.compute))
    first, others = zip(*(m.forked() if isinstance(m, Report) else (m, m) for m in matrices), strict=True)
    y = round(jnp.zeros((), jnp.int32), tokens, x, weights, first)
    if way.most_rounds == 1:
        return y

    rounds = num_rounds(mesh, way, chosen)
    return y + _further(round, lambda: reshard(jnp.zeros(y.shape, y.dtype), out), rounds, tokens, x, weights, others)


def num_rounds(mesh: ExpertMesh, way: Local | Padded | Ragged, chosen: Array) -> Array:
    """How many rounds the load of `chosen[batch seq k]` takes: the same number on all devices, of all stages too.

    A round has collectives. Those of two stages have no device in common, but nobody promises that devices of one
    program may meet them different numbers of times; and stages wait for each other after every tick anyway.
    """

    def local(chosen: Array) -> Array:
        return way.rounds(chosen.reshape(-1))

    rounds = per_device(local, (mesh.x,), PartitionSpec())(reshard(chosen, mesh.x))
    return lax.pmax(rounds, PIPE) if in_stage() else rounds


def _further(
    round: Callable[..., Array],
    zeros: Callable[[], Array],
    rounds: Array,
    tokens: Tokens,
    x: Array,
    weights: Array,
    matrices: Sequence[Stored],
) -> Array:
    """The sum of the rounds after the first, from `zeros` on."""
    types = [jax.typeof(value) for value in (x, weights)]
    fixed, varied = zip(*map(_divided, matrices), strict=True)

    def one(number: Array, tokens: Tokens, fixed: Any, x: Array, weights: Array, varied: Sequence[Any]) -> Array:
        return round(number, tokens, x, weights, list(map(_whole, fixed, varied)))

    @jax.named_scope(OVERFLOW_ROUNDS)
    def repeat(rounds: Array, body: Callable[[Array], Any], total: Any) -> Any:
        def step(carry: tuple[Array, Any]) -> tuple[Array, Any]:
            number, total = carry
            return number + 1, jax.tree.map(_joined, total, body(number), is_leaf=_is_report)

        return lax.while_loop(lambda carry: carry[0] < rounds, step, (jnp.ones((), jnp.int32), total))[1]

    @jax.custom_vjp
    def overflow(rounds: Array, tokens: Tokens, fixed: Any, *trained: Any) -> Array:
        return repeat(rounds, lambda number: one(number, tokens, fixed, *trained), zeros())

    def forward(*arguments: Any) -> tuple[Array, Any]:
        return overflow(*arguments), arguments

    def backward(arguments: Any, dy: Array) -> Any:
        rounds, tokens, fixed, *trained = arguments

        def gradients(number: Array) -> Any:
            _, pullback = jax.vjp(lambda *trained: one(number, tokens, fixed, *trained), *trained)
            return pullback(dy)

        empty = [like_operand(jnp.zeros(t.shape, t.dtype), t) for t in types]
        empty_weights = jax.tree.map(lambda w: as_cotangent(jnp.zeros(w.shape, w.dtype), w), trained[-1])
        return None, None, None, *repeat(rounds, gradients, (*empty, empty_weights))

    overflow.defvjp(forward, backward)
    return overflow(rounds, tokens, fixed, x, weights, varied)


def _divided(matrix: Stored | Report) -> tuple[Any, Any]:
    """What of a matrix is fixed, and what has a gradient; None where there is none of it. Integers have none."""
    if isinstance(matrix, Report):
        return None, matrix
    if not jnp.issubdtype((matrix.value if isinstance(matrix, HostWeight) else matrix).dtype, jnp.inexact):
        return matrix, None
    return (matrix.value, matrix.place) if isinstance(matrix, HostWeight) else (None, matrix)


def _whole(fixed: Any, varied: Any) -> Any:
    """The matrix of which these are the parts."""
    if fixed is None or varied is None:
        return varied if fixed is None else fixed
    return HostWeight(fixed, varied)


def _is_report(leaf: Any) -> bool:
    return isinstance(leaf, Report)


def _joined(total: Any, new: Any) -> Any:
    """The gradients, or the reports, of two rounds as one."""
    return jax.tree.map(MAX.pair if _is_report(total) else jnp.add, total, new)
