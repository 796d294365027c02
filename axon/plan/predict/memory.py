"""The memory of a device in a training step, by what it is for."""

from dataclasses import dataclass

from axon.plan.predict.shards import Shards

SUMS = {"tpu": 6, "gpu": 2}
"""How many times its gradients a pipeline's stage holds: their sum as it is carried, its successor, those of a tick,
and weights in the compute dtype. (Fitted: docs/planner.md.)"""

BUFFERS = 4
"""Buffers of tokens on their way to experts and back, of a forward and of its backward."""

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


def memory(shards: Shards) -> Memory:
    """What a device needs: of a pipeline's stages the one that needs most, as all run one program."""
    layer, head = max(_layer(shards, number) for number in range(len(shards.split.work.periods))), _head(shards)
    return Memory(
        {**kept(shards), "activations": _activations(shards)}
        | {"a layer at work" if layer > head else "the head at work": max(layer, head)}
    )


def kept(shards: Shards) -> dict[str, float]:
    """What does not depend on the batch."""
    split = shards.split
    times = SUMS[split.placement.platform] if split.stages > 1 else 2 if shards.layout.microbatches > 1 else 1
    parts = {**split.state, "gradients": times * split.gradients}
    return {kind: size * shards.padding for kind, size in parts.items() if size}


def _activations(shards: Shards) -> float:
    """What waits between forward and backward: of all layers, or in the slots of a pipeline's table."""
    of_token = shards.split.waiting(shards.remat, lambda number: shards.periods(number) / shards.virtual)
    of_chunk = shards.tokens * of_token
    if shards.split.stages == 1:
        return of_chunk
    stream, pools = shards.stream / shards.split.stream_split, shards.run.pools
    return pools.inputs * of_chunk + (pools.inputs + pools.gradients + 2) * stream


def _layer(shards: Shards, number: int) -> float:
    """What a layer's backward has at once: what it would keep without remat, its weights and the next one's as they are
    used, their gradients before they are reduced, and tokens on their way to experts."""
    weights = [one for one in shards.split.weights[number] if one.axes]
    gathered = sum(2 * one.size + one.elements * shards.split.work.reduce for one in weights)
    buffers = BUFFERS * shards.execution.capacity_factor * shards.split.exchanged[number] * shards.stream
    return shards.tokens * shards.split.kept[number, "none"] + gathered + buffers


def _head(shards: Shards) -> float:
    """The largest weight around the layers as it is used, and its gradient before that is reduced."""
    return max(one.size + one.elements * shards.split.work.reduce for one in shards.split.outer)
