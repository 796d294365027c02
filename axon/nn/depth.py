"""Depth: segments of blocks, a kind's parameters stacked along the axis `layers`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from axon import axes
from axon.axes import ArraySpec
from axon.errors import UserError
from axon.nn import layer_scan
from axon.nn.auxiliary import Auxiliary, over_layers
from axon.nn.cache import CacheSpec, page_names, split_cache
from axon.nn.capabilities import DiffersByLayer, HasPages, Rotates
from axon.nn.flops import forward_flops, is_trained, paths_in, training_flops
from axon.nn.inputs import Inputs
from axon.nn.mean_square import mean_square_taken, take_mean_square
from axon.nn.norm import RMSNorm
from axon.nn.remat import describe, remat_of, with_remat
from axon.nn.rope import Rope
from axon.nn.stored_layers import LayerValues, on_stages
from axon.own_code import written_at
from axon.parallel.pipeline.region import in_stage

MOST_LAYERS = 2**16
"""Periods of a segment at most: each layer has its number."""

UNROLLED = 16
"""Layers up to which a CPU, where there is no cache, and a pipeline's stage run them unrolled: it is faster than a
loop, and does not take long to compile. A stage adds each layer's gradient to its sum then, and stacks none before."""


class Segment:
    """A period of one or more kinds of block, repeated `times`: `Segment(13, local=Block(…), full=Block(…))`.

    A block is a module `block(x, inputs, cache=None) -> (x, cache, auxiliary)`: `x` is `batch seq.residual embed`,
    `cache` the arrays that it declares in `cache_specs(batch, length)`, `auxiliary` an `axon.nn.Auxiliary`. It knows
    nothing of depth.
    """

    def __init__(self, times: int, **kinds: nnx.Module):
        if not 1 <= times <= MOST_LAYERS or not kinds:
            raise UserError(
                f"Segment: {len(kinds)} kinds of block, {times} times; there must be at least one of both, and at most "
                f"{MOST_LAYERS} times"
            )
        self.times, self.kinds = times, kinds


@dataclass(frozen=True)
class _Span:
    """A segment's layers: `times` periods of `kinds`, from the logical layer `start` on."""

    start: int
    times: int
    kinds: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.start + self.times * len(self.kinds)

    def layers(self, kind: str) -> tuple[int, ...]:
        """The logical layers of a kind."""
        return tuple(range(self.start + self.kinds.index(kind), self.end, len(self.kinds)))


class Depth(nnx.Module):
    """Segments of blocks, one after the other.

    A kind's name is unique, and its parameters are this module's at `<kind>/…`, stacked along `layers`. Layers have
    logical numbers, in which the blocks run: a parameter carries those of its stack (`Param.layers`).
    How they run, and what the backward recomputes, says the `axon.axes.Execution` in force.
    """

    def __init__(self, *segments: Segment):
        self.spans, blocks = _spans(segments), {}
        for segment in segments:
            blocks |= segment.kinds
        for span in self.spans:
            for kind in span.kinds:
                if hasattr(self, kind):
                    raise UserError(f"Depth: a kind of block cannot be named {kind!r}: give it another name")
                setattr(self, kind, _stacked(blocks[kind], span.layers(kind), self.num_layers))

    @property
    def num_layers(self) -> int:
        """How many blocks run, one after the other."""
        return self.spans[-1].end

    @property
    def blocks(self) -> dict[str, nnx.Module]:
        """Kind → its block, parameters stacked."""
        return {kind: getattr(self, kind) for span in self.spans for kind in span.kinds}

    def __call__(self, x: Array, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Auxiliary]:
        """`x` through every block; `cache`, if any, as `cache_specs` declares it, comes back updated.

        Auxiliary losses are summed over layers; statistics are at `<kind>/<path>`, with a leading axis `layers`.
        """
        runs = [self._runs(span) for span in self.spans]
        self._log([list(map(len, own)) for own in runs], cache is not None)
        inputs, caches, auxiliaries = self._with_steps(self._with_angles(inputs), cache), {}, {}
        for span, own in zip(self.spans, runs, strict=True):
            numbers = {kind: jnp.asarray(span.layers(kind)) for kind in span.kinds}
            x, (own_caches, own_auxiliaries) = self._run(span, x, inputs, cache, numbers, own)
            caches |= own_caches
            auxiliaries |= own_auxiliaries
        return x, None if cache is None else caches, over_layers(auxiliaries)

    def part(
        self, x: Array, inputs: Inputs, periods: Sequence[Array], present: Sequence[Array | None]
    ) -> tuple[Array, Auxiliary]:
        """`x` through some periods of each segment, as a stage of a pipeline runs them.

        `periods`: of each segment, their numbers, or none; `present`: whether each is there, and changes anything;
        None: all are. The blocks' parameters are those of these periods alone, in this order; auxiliary terms are as
        `__call__` gives them.
        """
        self._log([[len(numbers)] for numbers in periods], has_cache=False)
        inputs, auxiliaries = self._with_angles(inputs), {}
        for span, numbers, there in zip(self.spans, periods, present, strict=True):
            if not len(numbers):
                continue
            kinds = len(span.kinds)
            layers = {kind: span.start + kinds * numbers + place for place, kind in enumerate(span.kinds)}
            x, (_, own) = self._run(span, x, inputs, None, layers, None, there)
            auxiliaries |= own
        return x, over_layers(auxiliaries)

    def each_layer(self, kind: str, fn: Callable[[Any], Any]) -> Any:
        """What `fn` makes of the block of each layer of a kind, stacked along a leading axis `layers`; outside of a
        pipeline."""
        graph = nnx.graphdef(self.blocks[kind])

        def layer(carry: None, parameters: Any) -> tuple[None, Any]:
            with axes.in_block(kind):
                return carry, fn(nnx.merge(graph, parameters))

        return lax.scan(layer, None, LayerValues(self.blocks[kind], reads=False).cut)[1]

    def cache_specs(self, batch: int, length: int) -> dict[str, dict[str, CacheSpec]]:
        """Kind → what its blocks remember of `length` tokens a sequence. Raises `UserError` for what is no `CacheSpec`.

        The layers are not split: what has a cache is outside of a pipeline, where every stage runs all of them.
        """
        return {
            kind: {name: _of_layers(spec, span.times) for name, spec in self._cache_specs(kind, batch, length).items()}
            for span in self.spans
            for kind in span.kinds
        }

    def _cache_specs(self, kind: str, batch: int, length: int) -> dict[str, CacheSpec]:
        """One layer's."""
        block: Any = self.blocks[kind]
        specs = block.cache_specs(batch, length)
        for name, spec in specs.items():
            if not isinstance(spec, CacheSpec):
                raise UserError(
                    f"{type(block).__name__} ({written_at(type(block))}), the block of kind {kind!r}: {name!r} of its "
                    f"cache_specs is of type {type(spec).__name__}; expected axon.nn.CacheSpec, with a cache_kind of "
                    "'pages' or 'state'"
                )
        return specs

    def _page_names(self, kind: str, has_cache: bool) -> frozenset[str]:
        return page_names(self._cache_specs(kind, 1, 1)) if has_cache else frozenset()

    def cache(self, batch: int, length: int) -> dict[str, dict[str, Array]]:
        """An empty one, as `cache_specs` declares it."""
        return jax.tree.map(_zeros, self.cache_specs(batch, length))

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token in a sequence of `seq`."""
        return sum(span.times * forward_flops(self.blocks[kind], seq) for span in self.spans for kind in span.kinds)

    def training_flops(self, seq: int, frozen: Collection[str], below: bool) -> tuple[int, bool]:
        """Forward and backward FLOPs of one token, see `axon.nn.flops.training_flops`; and whether any parameter is
        trained, here or `below`."""
        total = 0
        for span in self.spans:
            still = {kind: paths_in(kind, frozen) for kind in span.kinds}
            for times in (1, span.times - 1):  # above the first period lies whatever is trained in it
                for kind in span.kinds:
                    total += times * training_flops(self.blocks[kind], seq, still[kind], below)
                    below = below or is_trained(self.blocks[kind], still[kind])
        return total, below

    # ---- one segment ----------------------------------------------------------------------------------------------

    def _run(
        self,
        span: _Span,
        x: Array,
        inputs: Inputs,
        cache: Any,
        numbers: Mapping[str, Array],
        runs: Sequence[range] | None,
        present: Array | None = None,
    ) -> tuple[Array, Any]:
        """`x` through periods of a segment, and by kind the new cache and the auxiliary terms, with an axis `layers`.

        `numbers`: by kind, the logical numbers of the layers. `runs`: of the periods those that one trace is of; None:
        all, whichever these are. `present`: which periods there are; None: all.
        """
        has_cache, times = cache is not None, len(numbers[span.kinds[0]])
        reads = has_cache and axes.current() is not None and not on_stages()
        values = {kind: LayerValues(self.blocks[kind], reads) for kind in span.kinds}
        paged = {kind: self._page_names(kind, has_cache) for kind in span.kinds}
        states, pages = {}, {}
        for kind in span.kinds:
            states[kind], pages[kind] = split_cache(cache[kind] if has_cache else None, paged[kind])
        parts = {kind: (values[kind].cut, states[kind], numbers[kind]) for kind in span.kinds}
        each: Any = jnp.arange(times) if has_cache else None, parts
        if present is not None:
            each = each, present
        carry, results = (x, take_mean_square(x) if self._hands_on(span, has_cache) else None, pages), []
        spans = [range(times)] if runs is None else runs
        for run, part in zip(spans, layer_scan.cut(each, list(map(len, spans))), strict=True):
            in_scan = not self._unrolled(len(run), has_cache)
            period = self._period(span, inputs, values, paged, in_scan, run if runs else None)
            period = period if present is None else layer_scan.if_present(period)
            carry, result = layer_scan.scanned(period, carry, part, len(run), in_scan)
            results.append(result)
        (x, _, pools), (own, auxiliaries) = carry, layer_scan.joined(results)
        return x, ({kind: {**(own[kind] or {}), **pools[kind]} for kind in span.kinds}, auxiliaries)

    def _period(
        self,
        span: _Span,
        inputs: Inputs,
        values: Mapping[str, LayerValues],
        paged: Mapping[str, frozenset[str]],
        in_scan: bool,
        run: range | None,
    ) -> Callable[[Any, Any], tuple[Any, Any]]:
        """A period of a segment as the body of a scan over a run of them; None: over whichever these are."""
        logical = {kind: None if run is None else span.layers(kind)[run.start] for kind in span.kinds}
        layers = {kind: self._layer(kind, inputs, in_scan, logical[kind]) for kind in span.kinds}

        def period(carry: Any, part: Any) -> tuple[Any, Any]:
            (x, mean, pools), (place, parts), own, auxiliaries = carry, part, {}, {}
            for kind, layer in layers.items():
                cut, mine, number = parts[kind]
                weights = values[kind].of_layer(cut, place)
                given = weights, None if mine is None else {**mine, **pools[kind]}, number, place, mean
                (x, mean), new, auxiliaries[kind] = layer(x, given)
                own[kind], pool = split_cache(new, paged[kind])
                pools = {**pools, kind: pool}
            return (x, mean, pools), (own, auxiliaries)

        return period

    def _runs(self, span: _Span) -> list[range]:
        """The periods of a segment: neighbours whose modules all do the same are one run."""
        excepted = {kind: [m.excepted_layers for m in _differing(self.blocks[kind])] for kind in span.kinds}
        does = [
            [span.layers(kind)[i] in layers for kind in span.kinds for layers in excepted[kind]]
            for i in range(span.times)
        ]
        starts = [i for i in range(span.times) if i == 0 or does[i] != does[i - 1]]
        return [range(*ends) for ends in pairwise((*starts, span.times))]

    def _with_angles(self, inputs: Inputs) -> Inputs:
        return inputs.with_angles(self.all_ropes)

    @property
    def all_ropes(self) -> tuple[tuple[Rope, int], ...]:
        """By what its blocks rotate heads, and the size of these."""
        modules = (module for _, module in nnx.iter_modules(self) if isinstance(module, Rotates))
        return tuple(rope for module in modules for rope in module.ropes)

    def _with_steps(self, inputs: Inputs, cache: Any) -> Inputs:
        """With the step of each module that has pages in `cache`, as its kind of block is placed."""
        sizes = []
        for kind, own in (cache or {}).items():
            with axes.in_block(kind):
                modules = (module for _, module in nnx.iter_modules(self.blocks[kind]) if isinstance(module, HasPages))
                sizes += [module.paged_sizes(inputs, own) for module in modules]
        return inputs.with_steps(sizes)

    def _unrolled(self, times: int, has_cache: bool) -> bool:
        if times == 1:
            return True
        if (unroll := axes.execution().unroll) is not None:
            return unroll
        scope = axes.current()
        on_cpu = scope is not None and scope.placement.platform == "cpu"
        return (on_cpu and not has_cache and self.num_layers <= UNROLLED) or (in_stage() and times <= UNROLLED)

    def _hands_on(self, span: _Span, has_cache: bool) -> bool:
        """Whether a layer is told the mean of squares of its `x`: over a cache there are few tokens to read again."""
        modules = (module for kind in span.kinds for _, module in nnx.iter_modules(self.blocks[kind]))
        return not has_cache and any(isinstance(module, RMSNorm) and module.axis == "embed" for module in modules)

    def _layer(
        self, kind: str, inputs: Inputs, in_scan: bool, logical: int | None
    ) -> Callable[..., tuple[Any, Any, Auxiliary]]:
        """One layer of a kind, as a function of `x` and of its own parameters, cache, logical number, place among those
        of its kind, and mean of squares of `x`; which comes back with the new `x`, if it is given.

        `logical`: the logical number of one of the layers that it is traced for; None: not known.
        """
        block = self.blocks[kind]
        graph = nnx.graphdef(block)

        def layer(x, part):
            parameters, cache, number, place, mean = part
            with axes.in_block(kind), mean_square_taken(x, mean), axes.sequence_adapters(inputs.adapters):
                own = nnx.merge(graph, parameters)
                for module in _differing(own):
                    module.layer = logical
                result = own(x, inputs.in_layer(number, 0 if place is None else place), cache)
            x, cache, auxiliary = _checked(result, kind, block)
            # Else the embedding's order becomes that of all layers' inputs on TPUs, and each is copied in the backward.
            x = axes.row_major_in_training(x)
            return (x, None if mean is None else take_mean_square(x)), cache, auxiliary

        return with_remat(layer, remat_of(kind), block, in_scan)

    def _log(self, runs: Sequence[Sequence[int]], has_cache: bool) -> None:
        """Leave word of how each segment runs, of which there are runs of so many periods here."""
        how = []
        for span, own in zip(self.spans, runs, strict=True):
            modes = [("scanned", "unrolled")[self._unrolled(times, has_cache)] for times in own]
            counts = own if len(own) > 1 else [span.times]
            how += [f"{n} × {' + '.join(span.kinds)} {mode}" for n, mode in zip(counts, modes, strict=True)]
        policies = {kind: describe(remat_of(kind)) for kind in self.blocks}
        one, *others = set(policies.values())
        remat = ", ".join(f"{policy} of {kind}" for kind, policy in policies.items()) if others else one
        axes.log_choice("layers", f"{', '.join(how)}, remat {remat}")


def _spans(segments: tuple[Segment, ...]) -> tuple[_Span, ...]:
    spans, start, kinds = [], 0, set()
    for segment in segments:
        spans.append(_Span(start, segment.times, tuple(segment.kinds)))
        start = spans[-1].end
        if twice := kinds.intersection(segment.kinds):
            raise UserError(f"Depth: two segments have a kind named {min(twice)!r}: give each kind a name of its own")
        kinds.update(segment.kinds)
    if not spans:
        raise UserError("Depth: no segments; there must be at least one")
    return tuple(spans)


def _of_layers(spec: CacheSpec, layers: int) -> CacheSpec:
    """One layer's, for all that share it: along its own axis `_layers`, or stacked."""
    if "_layers" not in spec.axes:
        return replace(spec, axes=("_layers", *spec.axes), shape=(layers, *spec.shape))
    at = spec.axes.index("_layers")
    return replace(spec, shape=(*spec.shape[:at], layers, *spec.shape[at + 1 :]))


def _zeros(spec: ArraySpec) -> Array:
    return axes.shard(jnp.zeros(spec.shape, spec.dtype), " ".join(spec.axes), spec.kind)


def _stacked(block: nnx.Module, layers: tuple[int, ...], num_layers: int) -> nnx.Module:
    """`block`, all that it declares once for each of `layers`, of `num_layers` in all."""
    for _, variable in nnx.to_flat_state(nnx.state(block)):
        if variable.stack:
            raise UserError(f"Depth: this {type(block).__name__} stands elsewhere already: each kind needs its own")
        spec = variable.get_value()
        variable.set_value(jax.ShapeDtypeStruct((len(layers), *spec.shape), spec.dtype))
        variable.set_metadata(stack=("layers",), layers=layers, num_layers=num_layers)
    return block


def _differing(block: nnx.Module) -> list[DiffersByLayer]:
    return [module for _, module in nnx.iter_modules(block) if isinstance(module, DiffersByLayer)]


def _checked(result: Any, kind: str, block: nnx.Module) -> tuple[Array, Any, Auxiliary]:
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Auxiliary):
        return result
    single = "one array" if isinstance(result, Array) else f"a {type(result).__name__}"
    found = f"{len(result)} values" if isinstance(result, tuple) else single
    raise UserError(
        f"{type(block).__name__} ({written_at(type(block))}), the block of kind {kind!r}, returned {found}: a block "
        "returns (x, cache, auxiliary), of which the last is axon.nn.Auxiliary() where there is nothing to add"
    )
