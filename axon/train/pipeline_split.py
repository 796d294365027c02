"""A function of a model cut at the model's depth: what comes before its blocks, these, and what comes after."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from axon.errors import UserError
from axon.nn import Auxiliary, Inputs
from axon.parallel.pipeline.execute import PIPE
from axon.parallel.pipeline.partition import NOTHING, Partition, padding
from axon.runtime import Runtime, nested
from axon.train.gradients import reporting
from axon.train.objective import Batch

LAYERS = "layers/"
"""Where the paths of a language model's blocks begin."""


@dataclass(frozen=True)
class PipelineSplit:
    """The parts of `run`, a function of a model and a microbatch, as pure functions of those values that are not
    `fixed`.

    Args:
        run: calls the model once. name: of it, for messages. parts: a batch as microbatches. fixed: path → value of
            what no gradient is made for.
    """

    runtime: Runtime
    partition: Sequence[Partition]
    parts: Batch
    run: Callable[[Any, Batch], Any]
    name: str
    fixed: Mapping[str, Any]

    def first(self, outer: Mapping[str, Array], number: Array) -> Array:
        """The stream before the first block."""
        x, _ = self._before(self._bound({**outer, **self.fixed}), self._microbatch(number))
        return x

    def inputs(self, outer: Mapping[str, Array]) -> Inputs:
        """The blocks' inputs, of every microbatch."""

        def of_microbatch(part: Batch) -> Inputs:
            module = self._bound({**outer, **self.fixed})
            module.embed = _no_stream
            return self._before(module, part)[1]

        return jax.lax.map(of_microbatch, self.parts)

    def by_segment(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Path → value of the blocks, for each segment of the model."""
        return [
            {path: value for path, value in values.items() if path.removeprefix(LAYERS).split("/")[0] in span.kinds}
            for span in self.runtime.module.layers.spans
        ]

    def chunk(
        self,
        trained: Sequence[Mapping[str, Array]],
        fixed: Sequence[Mapping[str, Array]],
        reports: Sequence[Mapping[str, Array]],
        periods: Sequence[Array],
        x: Array,
        inputs: Inputs,
        active: Array | bool,
    ) -> tuple[Array, Any, Any]:
        """Some blocks, their auxiliary losses and their statistics. A stage that is idle has padding alone: of what
        lies in its memory a router would choose any experts, and their load would keep the other stages waiting."""
        module = self._bound({**joined(trained), **reporting(joined(fixed), joined(reports))})
        present = [
            one != NOTHING if padding(of_segment) else None
            for one, of_segment in zip(periods, self.partition, strict=True)
        ]
        x, auxiliary = module.layers.part(x, inputs.real_where(active), periods, present)
        statistics = auxiliary.within(LAYERS.rstrip("/")).statistics
        return x, auxiliary.losses, self.by_segment(statistics)

    def last(self, outer: Mapping[str, Array], x: Array, losses: Any, number: Array) -> Any:
        """What `run` gives of a microbatch."""
        module = self._bound({**outer, **self.fixed})
        calls = []

        def depth(own: Array, inputs: Inputs, cache: Any = None) -> tuple[Array, None, Auxiliary]:
            calls.append(own)
            return x, None, Auxiliary(losses)

        module.layers = depth
        found = self.run(module, self._microbatch(number))
        if len(calls) != 1:
            raise UserError(
                f"{self.name} calls the model {len(calls)} times for a batch, and a pipeline runs "
                f"it once. Take the mesh axis {PIPE!r} out of Layout.mesh"
            )
        return found

    def _before(self, module: Any, part: Batch) -> tuple[Any, Inputs]:
        """The stream before the first block, and what blocks are given besides."""
        module.layers = _stop
        try:
            self.run(module, part)
        except _Reached as reached:
            return reached.x, reached.inputs
        raise UserError(f"{self.name} does not call the model's blocks: there is nothing to pipeline")

    def _microbatch(self, number: Array) -> Batch:
        return {name: jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for name, x in self.parts.items()}

    def _bound(self, values: Mapping[str, Any]) -> Any:
        """The module with these values; those that it does not need are only described."""
        described = {**self.runtime.parameters, **self.runtime.variables}
        return self.runtime.bind(nested({**described, **values}))


class _Reached(Exception):
    """The model's depth was called: what comes before it is known."""

    def __init__(self, x: Any, inputs: Inputs):
        self.x, self.inputs = x, inputs


def _no_stream(inputs: Inputs) -> None:
    """In place of a model's `embed`."""


def _stop(x: Any, inputs: Inputs, cache: Any = None) -> Any:
    raise _Reached(x, inputs)


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Path → value, of all segments."""
    return {path: value for of_segment in parts for path, value in of_segment.items()}


def parted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Path → value, of the blocks, and of all else."""
    blocks = {path: value for path, value in values.items() if path.startswith(LAYERS)}
    return blocks, {path: value for path, value in values.items() if path not in blocks}
