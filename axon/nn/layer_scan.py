"""Periods of a segment, one after the other: scanned or unrolled, from the stages that store them, and in runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.nn.stored_layers import on_stages, stored_layer
from axon.parallel.pipeline.region import in_stage


def scanned(period: Callable[..., Any], carry: Any, parts: Any, times: int, in_scan: bool) -> tuple[Any, Any]:
    """`lax.scan(period, carry, parts)`, as a loop if `in_scan`, else its body once for each period."""
    if on_stages():
        return _from_stages(period, carry, parts, times, in_scan)
    if in_scan or in_stage():
        # Also unrolled, so that the backward has the stacked weights themselves, and no copies, which would wait.
        return lax.scan(period, carry, parts, unroll=1 if in_scan else times)
    return _unrolled(period, carry, _unstacked(parts, times))


def _from_stages(period: Callable[..., Any], carry: Any, parts: Any, times: int, in_scan: bool) -> tuple[Any, Any]:
    """The same outside of a pipeline, whose stages store the layers."""
    text = "each is sent to all stages, which all run it: evaluation and samples take as long as on one stage"
    axes.log_choice("layers outside of the pipeline", text)
    if in_scan:
        return lax.scan(lambda carry, i: period(carry, stored_layer(parts, i)), carry, jnp.arange(times))
    return _unrolled(period, carry, (stored_layer(parts, i) for i in range(times)))


def if_present(period: Callable[..., Any]) -> Callable[..., Any]:
    """A period, told besides whether it is there: one that is not changes nothing, and adds nothing."""

    def run(carry: Any, part: tuple[Any, Array]) -> tuple[Any, Any]:
        parts, present = part
        parts = jax.tree.map(partial(_reports_if, present), parts, is_leaf=lambda x: isinstance(x, axes.Reporting))
        after, (caches, auxiliaries) = period(carry, parts)
        kept = jax.tree.map(lambda value: jnp.where(present, value, jnp.zeros_like(value)), auxiliaries)
        return jax.tree.map(lambda y, x: jnp.where(present, y, x), after, carry), (caches, kept)

    return run


def _reports_if(present: Array, value: Any) -> Any:
    """What a layer is given, a report only where the layer is there."""
    if not isinstance(value, axes.Reporting):
        return value
    return replace(value, report=jnp.where(present, value.report, jnp.zeros_like(value.report)))


def _unrolled(period: Callable[..., Any], carry: Any, parts: Iterable[Any]) -> tuple[Any, Any]:
    """`period` of each of `parts`, and what they give stacked."""
    results = []
    for one in parts:
        carry, result = period(carry, one)
        results.append(result)
    return carry, jax.tree.map(lambda *each: jnp.stack(each), *results)


def _unstacked(parts: Any, times: int) -> list[Any]:
    """One tree for each period. A split, not slices: its transpose is one concatenation, not a sum of padded arrays."""
    leaves, tree = jax.tree.flatten(parts)
    split = [lax.split(leaf, (1,) * times) for leaf in leaves]
    return [tree.unflatten(lax.squeeze(each[i], (0,)) for each in split) for i in range(times)]


def cut(parts: Any, sizes: Sequence[int]) -> list[Any]:
    """One tree for each run of so many neighbouring periods; the whole itself for one."""
    if len(sizes) == 1:
        return [parts]
    leaves, tree = jax.tree.flatten(parts)
    pieces = [lax.split(leaf, sizes) for leaf in leaves]
    return [tree.unflatten(each[i] for each in pieces) for i in range(len(sizes))]


def joined(results: Sequence[Any]) -> Any:
    """What the runs gave, as one tree for all periods."""
    return results[0] if len(results) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *results)
