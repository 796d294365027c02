"""The memory of a device in a training step, by what it is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from axon.axes import Execution
from axon.parallel.pipeline.rows import SlotBytes
from axon.plan.predict.context import Context
from axon.plan.predict.shards import Shards

SUMS = {"tpu": 6, "gpu": 2, "cpu": 2}
"""How many times its gradients a pipeline's stage holds: their sum as it is carried, its successor, those of a tick,
and weights in the compute dtype. (Fitted: docs/planner.md.)"""

ALIVE = {"tpu": 1.0, "gpu": 0.75, "cpu": 1.0}
"""How much of what a layer at work would have, were nothing freed or fused, is there at once. (Fitted likewise.)"""

BUFFERS = 4
"""Buffers of tokens on their way to experts and back, of a forward and of its backward, in a round. An overflow round
computes its forward again while what the first one kept is there."""

RING_HELD = 27
"""Bytes that a step of ring attention's backward holds for each element of queries, keys and values: sums and parts of
their gradients in float32, operands laid out for the kernels, and what travels. (By the arrays at a compiled program's
peak: docs/planner.md.)"""

STATE = {"params": "parameters", "optimizer": "optimizer"}
"""Kind of array → what a part of the state is called."""

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of a device by kind: what is kept from step to step, and what one step needs besides."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def gib(self) -> float:
        return self.total / GIB


class Declared(NamedTuple):
    """Declarations of a pipelined program that is built, in place of what is known before: bytes of a device's state by
    kind, and of a chunk's slots."""

    state: Mapping[str, float]
    slots: SlotBytes


def memory(shards: Shards, declared: Declared | None = None) -> Memory:
    """What a device needs: of a pipeline's stages the one that needs most, as all run one program."""
    works = [_layer(shards, number) for number in range(len(shards.split.work.periods))]
    works += [{"the head at work": _head(shards)}, {"an update at work": _update(shards)}]
    most = max(works, key=lambda parts: sum(parts.values()))
    state, slots = declared or (None, None)
    parts = {**kept(shards, state), "activations": _activations(shards, slots), **most}
    return Memory({kind: size for kind, size in parts.items() if size})


def kept(shards: Shards, state: Mapping[str, float] | None = None) -> dict[str, float]:
    """What does not depend on the batch. `state`: as of `Declared`."""
    split = shards.split
    times = SUMS[split.placement.platform] if split.stages > 1 else 2 if shards.layout.microbatches > 1 else 1
    found = state or split.state
    sums = {"gradients": split.gradients, "sums of gradients": (times - 1) * split.gradients}
    parts = {**found, **sums, **dict.fromkeys(away(shards.execution), 0.0)}
    return {kind: size for kind, size in parts.items() if size}


def away(execution: Execution) -> list[str]:
    """The kinds of state that lie in the host's memory."""
    return [STATE[kind] for kind in execution.host]


def on_host(shards: Shards) -> float:
    """Bytes of the host's memory that a device's state and activations take."""
    state = sum(shards.split.state[kind] for kind in away(shards.execution))
    return state + of_chunk(shards).offloaded * (shards.run.pools.inputs if shards.split.stages > 1 else 1)


def _activations(shards: Shards, slots: SlotBytes | None) -> float:
    """What waits between forward and backward: of all layers, or in the slots of a pipeline's table; and of what waits
    on the host one period's, on its way."""
    found = slots or of_chunk(shards)
    sent = found.offloaded / sum(shards.places)
    return sent + (found.residuals if shards.split.stages == 1 else found.total(shards.run.pools))


def of_chunk(shards: Shards) -> SlotBytes:
    """What waits for a microbatch of the layers of a chunk; without a pipeline of all layers, their input among it."""
    split, places = shards.split, shards.places
    of_token = split.waiting(shards.waits.here, places.__getitem__)
    stream = shards.stream / split.stream_split
    inputs = sum(places) - 1 if split.stages > 1 else 0  # that of the chunk has a slot of its own
    if shards.waits.input:
        of_token -= sum(count * size for count, size in zip(places, split.inputs, strict=True))
        inputs += split.stages > 1
    of_token += inputs * stream / shards.tokens
    left = sum(count * split.left(n, shards.waits.computed) for n, count in enumerate(places)) if shards.splits else 0.0
    offloaded = sum(count * shards.sent(n) for n, count in enumerate(places))
    return SlotBytes(stream, *(shards.tokens * size for size in (of_token, left, offloaded)))


def _layer(shards: Shards, number: int) -> dict[str, float]:
    """What a layer's backward has at once: what it would keep without remat, a ring's step, an overflow round's rows of
    experts; and in buffers of collectives its weights and the next one's as they are used, their gradients before they
    are reduced, and tokens on their way to experts. Of a period with several layers the largest one's."""
    split = shards.split
    weights = [one for one in split.weights[number] if one.axes]
    gathered = sum(2 * one.size + one.trained * split.work.reduce for one in weights)
    largest = split.work.periods[number].largest
    layer = largest * shards.tokens * split.kept(number, "none")
    if Context(shards).merges:
        layer += RING_HELD * shards.tokens * (split.queries[number] + largest * split.keys[number])
    rounds = 2 if split.overflows else 1
    rows = (rounds - 1) * (shards.tokens * split.rows[number] + 2 * split.experts[number].bytes)
    buffers = rounds * BUFFERS * split.capacity * split.exchanged[number] * shards.stream
    alive = ALIVE[split.placement.platform]
    return {
        "a layer at work": alive * (layer + largest * rows),
        "collective buffers": alive * largest * gathered + buffers,
    }


def _head(shards: Shards) -> float:
    """The largest weight around the layers as it is used, and its gradient before that is reduced."""
    return max(one.size + one.trained * shards.split.work.reduce for one in shards.split.outer)


def _update(shards: Shards) -> float:
    """Bytes on the device while a layer whose state is on the host is updated: the state before, and after."""
    layers = sum(period.times for period in shards.split.work.periods)
    return sum(2 * shards.split.state[kind] / layers for kind in away(shards.execution))
