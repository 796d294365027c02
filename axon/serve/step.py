"""The compiled step of the engine: new tokens of many sequences through the model, their keys and values into pages,
and the next tokens drawn, all on the devices.

Two programs follow each other: the model's, of which there is one for each size of a step, and that which draws, which
has other shapes for what requests ask of their draws; it is small.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from axon import axes
from axon.composition import SEQUENCE_STATES, Part, check_composition
from axon.errors import UserError
from axon.kernels.attention import causal_window
from axon.kernels.paged_attention.cache import quantised
from axon.nn import Inputs, Rope
from axon.nn.cache import SCALE, CacheSpec, of_cache_kind
from axon.nn.capabilities import HasPages
from axon.nn.kv_cache import SCALES, Ragged
from axon.runtime import Runtime
from axon.serve.pages import PagePool
from axon.serve.sampler import SampleOutput, SampleParams, draw
from axon.serve.text_model import TextModel
from axon.serve.unsplit import unsplit

ROWS_AT_ONCE = 16
"""Rows of a product that a CPU computes at once, whatever the step has: so the bits of a row do not depend on how many
others there are. All at once would be as fast to 1.8 times as fast, and of a step only the blocks with a token are
computed."""

SAME_SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""On a CPU XLA leaves matrix products to a library, and sums over elements only where there are many: in another order
than its own. With this it does not."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What the host says of one step. The sequences are those of the engine's slots, in their order; those that have
    nothing to do have no tokens.

    Args:
        tokens: int32 `tokens`; below 0 the token that was drawn last in slot −1 − token, which the host does not know
            yet. positions: of each, in its sequence. last: of each, the last position of its sequence.
        lens, bounds, tables, drafts, versions: see `axon.nn.kv_cache.Ragged`.
        rows: int32 `rows`: the tokens from the output of which the next ones are drawn, and −1 after the last of them.
        adapters: int32 `tokens`: the number of each one's adapter, 0 for none; None: there is no room for any.
        owners: int32 `rank`: the number of the adapter whose each rank is.
    """

    tokens: Any
    positions: Any
    last: Any
    lens: Any
    bounds: Any
    tables: tuple[Any, ...]
    rows: Any
    drafts: Any
    versions: Any
    adapters: Any = None
    owners: Any = None


class Step:
    """A runtime's module over one pool of pages a window, compiled for a few sizes of a step.

    Args:
        length: positions of a sequence, at most.

    Attributes:
        windows: how many keys the layers see, each with a pool of its own; of `windows_of`.
    """

    def __init__(self, runtime: Runtime, length: int):
        self.runtime, self.length, self.windows = runtime, length, windows_of(runtime.module)
        self.placement = unsplit(runtime.placement, "batch", "seq")
        self._forward = self.jit(self._logits, donate_argnames="cache")
        self._draw = self.jit(_drawn, donate_argnames="last")

    def logits(self, parameters: Any, variables: Any, cache: Any, last: Array, inputs: StepInputs) -> tuple[Array, Any]:
        """float32 `rows vocab`, and the cache, which is donated; `last[slots]`: the last draw of each slot."""
        with self.tracing():
            return self._forward(parameters, variables, cache=cache, last=last, inputs=inputs)

    def draw(self, logits: Array, last: Array, slots: Any, draws: SampleParams) -> tuple[SampleOutput, Array]:
        """What is drawn of each row, and `last` with it, which is donated; `slots[rows]`: where each draw is kept; as
        many as there are slots: nowhere."""
        with self.tracing():
            return self._draw(logits, last=last, slots=slots, draws=draws)

    def traced(self, parameters: Any, variables: Any, cache: Any, last: Any, inputs: StepInputs) -> Any:
        """`logits`, traced: to be lowered for the mesh's platform by `Runtime.lower`, whichever machine this is."""
        with self.tracing():
            return self._forward.trace(parameters, variables, cache=cache, last=last, inputs=inputs)

    def jit(self, fn: Callable[..., Any], **options: Any) -> Any:
        """`fn` compiled as all of a step is; to be called within `tracing`."""
        more = SAME_SUMS if self.placement.platform == "cpu" else {}
        return self.runtime.jit(fn, more=more, **options)

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return self._forward._cache_size() + self._draw._cache_size()

    def cache_specs(
        self, pools: Mapping[int | None, PagePool], slots: int, versions: int, dtype: Any = None
    ) -> dict[str, dict[str, CacheSpec]]:
        """By kind of block its cache: all pages of its window's pool, and the states of so many sequences, `versions`
        of each that is not constant; `dtype`: in which pages are kept, the compute dtype by default. Raises `UserError`
        for quantised latents."""
        windows, found = windows_by_kind(self.runtime.module), {}
        for kind, specs in declared_caches(self.runtime, self.length).items():
            pages = pool_specs(specs, pools[windows[kind]], dtype) if kind in windows else {}
            found[kind] = pages | state_specs(specs, slots, versions)
        return found

    def snapshot_specs(self, count: int) -> dict[str, dict[str, CacheSpec]]:
        """By kind of block that has any, so many of its states that are not constant; empty for a model without."""
        found = {}
        for kind, specs in declared_caches(self.runtime, self.length).items():
            states = state_specs(specs, count, 1)
            found[kind] = {name: spec for name, spec in states.items() if not spec.constant}
        return {kind: specs for kind, specs in found.items() if specs}

    def empty_cache(self, specs: Any) -> Any:
        """One of zeros."""

        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self.abstract_cache(specs))

    def abstract_cache(self, specs: Any) -> Any:
        """The arrays as `jax.ShapeDtypeStruct`s, where they are."""
        return self.runtime.abstract(specs, self.placement)

    def no_draws(self, slots: int) -> Array:
        """Of each slot the last draw, before there is one."""
        return jnp.zeros(slots, jnp.int32, device=NamedSharding(self.placement.mesh, PartitionSpec(None)))

    def tracing(self) -> Any:
        """The context in which programs are traced."""
        rows = ROWS_AT_ONCE if self.placement.platform == "cpu" else None
        return self.runtime.tracing(self.placement, row_block=rows)

    def _logits(
        self, parameters: Any, variables: Any, cache: Any, last: Array, inputs: StepInputs
    ) -> tuple[Array, Any]:
        return self.computed(parameters, variables, cache, last, inputs)[:2]

    def computed(
        self, parameters: Any, variables: Any, cache: Any, last: Array, inputs: StepInputs
    ) -> tuple[Array, Any, Array]:
        """What `logits` gives, and of all tokens of the step the last layer's output, `batch seq embed`."""
        model: TextModel = self.runtime.bind(parameters, variables)
        known = inputs.tokens >= 0
        tokens = jnp.where(known, inputs.tokens, last[jnp.where(known, 0, -1 - inputs.tokens)])
        with axes.valid_rows(inputs.bounds[-1]), adapters_of(inputs, inputs.adapters):
            hidden, cache, _ = model.hidden(model_inputs(tokens, inputs, self.windows), cache)
        hidden = axes.shard(hidden, "batch seq embed")
        own = None if inputs.adapters is None else inputs.adapters[inputs.rows]
        with axes.valid_rows(jnp.sum(inputs.rows >= 0)), adapters_of(inputs, own):
            return logits_of(model, hidden[:, inputs.rows]), cache, hidden


def _drawn(logits: Array, last: Array, slots: Array, draws: SampleParams) -> tuple[SampleOutput, Array]:
    found = draw(logits, draws)
    return found, last.at[slots].set(found.ids, mode="drop")


def logits_of(model: TextModel, hidden: Array) -> Array:
    """float32 `rows vocab` of `hidden[batch rows embed]`, in one row of `batch`."""
    return axes.shard(model.output.logits(hidden), "batch seq vocab.whole")[0].astype(jnp.float32)


def adapters_of(inputs: StepInputs, adapters: Array | None) -> AbstractContextManager[None]:
    """The context in which each token of a step, or each of its rows, has its own one of the `adapters`."""
    if adapters is None:
        return nullcontext()
    return axes.own_ranks(axes.shard((adapters[:, None] == inputs.owners)[None], "batch seq rank"))


def model_inputs(tokens: Array, inputs: StepInputs, windows: tuple[int | None, ...]) -> Inputs:
    """The model's inputs: all sequences' tokens in one row of `batch`."""
    ragged = Ragged(inputs.lens, inputs.bounds, inputs.tables, windows, inputs.drafts, inputs.versions)
    in_row = (axes.shard(x[None], "batch seq") for x in (tokens, inputs.positions, inputs.last))
    tokens, positions, last = in_row
    return Inputs(tokens, positions, start=ragged, last=last)


def pool_specs(specs: Mapping[str, CacheSpec], pool: PagePool, dtype: Any) -> dict[str, CacheSpec]:
    """The pages of a block's cache, as many, and with as many tokens each, as a pool has."""
    found, sizes = {}, {"pages": pool.count, "page_size": pool.size}
    for name, spec in of_cache_kind(specs, "pages").items():
        shape = tuple(sizes.get(axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True))
        found[name] = replace(spec, shape=shape, dtype=spec.dtype if dtype is None else dtype)
        if dtype is not None and quantised(dtype):
            if name not in ("key", "value"):
                raise UserError(
                    f"a cache of {jnp.dtype(dtype).name} is for keys and values, and this model's has {name}s"
                )
            scales = replace(spec, axes=tuple(SCALES.split()), shape=shape[:-1], dtype=jnp.float32)
            found[SCALE.format(name)] = scales
    return found


def state_specs(specs: Mapping[str, CacheSpec], slots: int, versions: int) -> dict[str, CacheSpec]:
    """The states of a block's cache, for each of so many sequences one that is constant and `versions` of others."""

    def of_slots(spec: CacheSpec) -> CacheSpec:
        count = slots if spec.constant else slots * versions
        shape = tuple(count if axis == "batch" else size for axis, size in zip(spec.axes, spec.shape, strict=True))
        return replace(spec, shape=shape)

    return {name: of_slots(spec) for name, spec in of_cache_kind(specs, "state").items()}


def declared_caches(runtime: Runtime, length: int) -> dict[str, dict[str, CacheSpec]]:
    """Kind of block → what it declares of its cache, of all its layers and one sequence of so many positions."""
    with runtime.tracing():
        return runtime.module.layers.cache_specs(1, length)


def check_guesses(drafter: str, specs: Iterable[Mapping[str, CacheSpec]]) -> None:
    """Raise `UserError` for a model that guesses with states, which are not undone when it has guessed wrong."""
    parts = [Part(drafter, "guess by n-grams, --draft ngram", excludes={SEQUENCE_STATES: "its guesses stay in them"})]
    if any(of_cache_kind(own, "state") for own in specs):
        name, remedy = "blocks of its model that keep states of sequences", "give one whose caches are pages alone"
        parts.append(Part(name, remedy, frozenset({SEQUENCE_STATES})))
    check_composition(parts)


def windows_by_kind(module: Any) -> dict[str, int | None]:
    """Of each kind of block with pages, how many keys its attention sees; None: all."""
    return {kind: window_of(block) for kind, block in module.layers.blocks.items() if _paged_modules(block)}


def window_of(block: Any) -> int | None:
    """How many keys its attention sees, the largest of several; None: all."""
    found = [causal_window(attention.config.mask) for attention in _paged_modules(block)]
    return max((size for size in found if size is not None), default=None) if None not in found else None


def _paged_modules(block: Any) -> list[Any]:
    return [part for _, part in nnx.iter_modules(block) if isinstance(part, HasPages)]


def windows_of(module: Any) -> tuple[int | None, ...]:
    """The windows of a model's blocks, the full one first. Of a model of states alone the full one: its pages only
    count tokens."""
    return tuple(sorted(set(windows_by_kind(module).values()), key=lambda size: size or 0)) or (None,)


def changes_at(module: Any) -> int | None:
    """The position from which on a sequence that has it rotates at other frequencies, all of it, as LongRoPE's do."""
    ropes = (getattr(part, "rope", None) for _, part in nnx.iter_modules(module))
    scalings = [rope.scaling for rope in ropes if isinstance(rope, Rope) and rope.scaling is not None]
    return min((at for scaling in scalings if (at := scaling.changes_at) is not None), default=None)
