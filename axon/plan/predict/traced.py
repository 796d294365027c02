"""A period of layers, forward and backward, as JAX traces it for one sequence on one device: what waits in between.

What waits on a stage, and what a split backward's part for the inputs leaves for that for the weights, is what a
pipeline's executor makes of the same period (`axon.parallel.pipeline.equations`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from axon.axes import ArraySpec
from axon.axes.execution import Remat
from axon.nn.inputs import Inputs
from axon.parallel.pipeline import residuals
from axon.plan.flops import count_jaxpr, flops_of_kernels
from axon.plan.predict.replay import FLASH, Replay
from axon.runtime import nested
from axon.train.step import Program

LAYERS = "layers/"

STREAM, HEADS, KV_HEADS, TOKENS = "stream", "heads", "kv_heads", "tokens"
"""How a kept array is split besides by its tokens: as the stream between blocks, over what splits heads and widths of
MLPs, over what splits heads of keys, or not at all."""


@dataclass(frozen=True)
class Kept:
    """What waits of each token between forward and backward: bytes by how they are split.

    Args:
        bytes: but for rows. rows: of its copies for experts. shared: of `bytes`, what is the same for all layers, as
            angles by position are: it waits once.
    """

    bytes: Mapping[str, float]
    rows: Mapping[str, float]
    shared: float = 0.0

    def of(self, stream: float, heads: float, kv_heads: float, capacity: float = 1.0) -> float:
        """Bytes of a token, its parts divided by these; of rows with so much more room than a balanced load takes."""
        by = {STREAM: stream, HEADS: heads, KV_HEADS: kv_heads, TOKENS: 1.0}
        plain, rows = (sum(size / by[split] for split, size in part.items()) for part in (self.bytes, self.rows))
        return plain + capacity * rows

    def __add__(self, other: "Kept") -> "Kept":
        plain, rows = (
            {split: part.get(split, 0.0) + more.get(split, 0.0) for split in {**part, **more}}
            for part, more in ((self.bytes, other.bytes), (self.rows, other.rows))
        )
        return Kept(plain, rows, self.shared + other.shared)


class Traced(NamedTuple):
    """A period, forward and backward, under a policy: what it keeps of a token; what waits of it in a pipeline's slots,
    but its input; what a split backward's part for the inputs leaves for that for the weights; FLOPs of a token, and
    those of kernels of attention among them; the traced program; name → what it keeps of a token."""

    kept: Kept
    waits: Kept
    left: Kept
    flops: float
    attention: float
    replay: Replay
    names: Mapping[str, Kept]


def trace(program: Program, number: int, frozen: frozenset[str], remat: Remat, copies: int) -> Traced:
    """One period under a policy, in which each token goes to so many experts. No kernel is asked for by name: a chip
    that is not here has none."""
    runtime, seq = program.runtime, program.seq
    arguments = _arguments(program, frozen)

    def forward_and_backward(*arguments: Any) -> Any:
        y, backward, _ = _pullback(program, number, arguments)
        return jax.tree.leaves(backward), backward(y)

    with runtime.tracing(execution=replace(runtime.execution, remat=remat, kernels={})):
        traced, (kept, _) = jax.make_jaxpr(forward_and_backward, return_shape=True)(*arguments)
        executed = _executed(program, number, arguments)
    parameters, still, *_ = arguments
    weights = {(shape, spec.dtype) for spec in (parameters | still).values() for shape in (spec.shape, spec.shape[1:])}
    sizes, own = _Sizes(runtime.module.dims, seq, copies), len(jax.tree.leaves(arguments[:4]))

    def of(types: Sequence[Any], varies: Iterable[bool]) -> Kept:
        arrays = zip(varies, types, strict=False)  # the outputs of the whole after those are gradients
        return sizes.kept([(of, one) for of, one in arrays if (one.shape, one.dtype) not in weights])

    types, after = executed.forward.types, executed.backward.types
    waits = of(types, _varies(executed.forward.first.jaxpr, own)[-len(types) :])
    counts = count_jaxpr(traced.jaxpr).flops / seq, flops_of_kernels(traced.jaxpr, FLASH) / seq
    replay = Replay(traced.jaxpr, len(kept))
    left = of(after, [True] * len(after))
    return Traced(of(kept, _varies(traced.jaxpr, own)), waits, left, *counts, replay, sizes.named(replay))


def _arguments(program: Program, frozen: frozenset[str]) -> tuple[Any, ...]:
    """What a period is a function of: parameters that train and that do not, variables, the stream and ids."""
    runtime, seq = program.runtime, program.seq
    parameters = {path: _one_layer(path, spec) for path, spec in runtime.parameters.items()}
    still = {path: parameters.pop(path) for path in frozen}
    variables = {path: _one_layer(path, spec) for path, spec in runtime.variables.items()}
    stream = jax.ShapeDtypeStruct((1, seq, runtime.module.dims["embed"]), runtime.compute_dtype)
    return parameters, still, variables, stream, jax.ShapeDtypeStruct((1, seq), jnp.int32)


def _pullback(program: Program, number: int, arguments: Sequence[Any]) -> tuple[Any, residuals.Pullback, Any]:
    """A period's output, and its backward to gradients of what trains and of the stream."""
    runtime, spans = program.runtime, program.module.layers.spans
    parameters, still, variables, x, ids = arguments

    def forward(parameters: Any, x: Any) -> Any:
        module = runtime.bind(nested(parameters | still), nested(variables))
        periods = [jnp.arange(int(place == number)) for place in range(len(spans))]
        inputs = Inputs(ids, ids, ids, adapters=ids[:, 0])
        return module.layers.part(x, inputs, periods, [None] * len(spans))[0]

    return *jax.vjp(forward, parameters, x), ()


def _executed(program: Program, number: int, arguments: Sequence[Any]) -> residuals.Kept:
    """The forward and the backward as a pipeline runs them, where the stream's gradient is made first."""
    found = []

    def split(*arguments: Any) -> tuple[()]:
        pullback = partial(_pullback, program, number)
        found.append(residuals.Kept.of(pullback, arguments, at_once=len(arguments[0])))
        return ()

    jax.eval_shape(split, *arguments)
    return found[0]


def _varies(jaxpr: Any, inputs: int) -> list[bool]:
    """Of each output whether it depends on one of the first `inputs`: a layer's weights, or its stream. The others are
    of positions alone."""
    found = set(jaxpr.invars[:inputs])

    def depends(one: Any) -> bool:
        return isinstance(one, Var) and one in found

    for equation in jaxpr.eqns:
        if any(map(depends, equation.invars)):
            found.update(equation.outvars)
    return list(map(depends, jaxpr.outvars))


def _one_layer(path: str, spec: ArraySpec) -> jax.ShapeDtypeStruct:
    shape = (1, *spec.shape[1:]) if path.startswith(LAYERS) else spec.shape
    return jax.ShapeDtypeStruct(shape, spec.dtype)


@dataclass(frozen=True)
class _Sizes:
    """How arrays of a traced period are split, by their shapes: of a model with these sizes, one sequence and so many
    copies of a token for experts."""

    dims: Mapping[str, int]
    seq: int
    copies: int

    def kept(self, arrays: Iterable[tuple[bool, Any]]) -> Kept:
        """Arrays, of which each says whether it differs from layer to layer; nothing of masks, and of what is not of
        tokens."""
        sizes: dict[str, float] = dict.fromkeys((STREAM, HEADS, KV_HEADS, TOKENS), 0.0)
        rows, shared = dict.fromkeys(sizes, 0.0), 0.0
        for own, one in arrays:
            size = one.dtype.itemsize * math.prod(one.shape) / self.seq
            if self._of_rows(one.shape):
                rows[TOKENS if one.shape[-1] == self.dims["embed"] else HEADS] += size
            elif one.dtype != bool and any(n and n % self.seq == 0 for n in one.shape):
                sizes[self._split(one.shape) if own else TOKENS] += size
                shared += 0.0 if own else size
        return Kept(sizes, rows, shared)

    def named(self, replay: Replay) -> dict[str, Kept]:
        """Name → the arrays of a period that have it."""
        found: dict[str, list[tuple[bool, Any]]] = {}
        for name, one in replay.named(replay.names):
            found.setdefault(name, []).append((True, one))
        return {name: self.kept(arrays) for name, arrays in found.items()}

    def _of_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether an array has a row for each copy of a token, and perhaps some more."""
        return self.copies > 1 and len(shape) in (2, 3) and shape[-2] >= self.copies * self.seq

    def _split(self, shape: tuple[int, ...]) -> str:
        width, head_dim = math.prod(shape) / self.seq, self.dims.get("head_dim", 1)
        if shape[-1] == self.dims["embed"] and len(shape) == 3:
            return STREAM
        if width == self.dims.get("kv_heads", 0) * head_dim:
            return KV_HEADS
        return HEADS if width > 2 * head_dim or width == self.dims.get("heads") else TOKENS
