"""Depth: many equal blocks, their parameters stacked along the axis `layers`."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from axon import axes
from axon.errors import UserError, suggest
from axon.nn.inputs import Inputs
from axon.nn.param import Param

REMAT_NAMES = ("query", "key", "value", "attention", "gate", "up")
"""Activations of a block that a remat policy can keep, by name."""

REMAT_POLICIES = ("none", "full", "minimal")

Remat = str | tuple[str, ...]


class Stack(nnx.Module):
    """`layers` blocks like `block`, one after the other.

    Args:
        block: a module `block(x, inputs, *shared, memory) -> (x, memory)`; it knows nothing of the stack.
        layers: how many.
        remat: what the backward recomputes. "none": nothing; "full": all but each block's input; "minimal": all but
            matmul outputs and attention (`REMAT_NAMES`); or a tuple of the names to keep, of those that the block's
            modules say they give, in their attribute `remat_names`.
        unroll: write the blocks out one by one, rather than as one `lax.scan`; None: on CPU up to 16 layers.
    """

    def __init__(self, block: nnx.Module, layers: int, remat: Remat = "none", unroll: bool | None = None):
        check_remat(remat, _named(block))
        self.block, self.layers, self.remat, self.unroll = block, layers, remat, unroll
        for _, param in nnx.to_flat_state(nnx.state(block, Param)):
            spec = param.get_value()
            param.set_value(jax.ShapeDtypeStruct((layers, *spec.shape), spec.dtype))
            param.set_metadata(stack=("layers",))

    def __call__(self, x: Array, inputs: Inputs, *shared: Any, memory: Any = None) -> tuple[Array, Any]:
        """`x` through every block; `memory`, if any, has a leading axis `layers` and comes back updated.

        Every block is given `inputs`, with a key of its own, and `shared`, the same for all.
        """
        graph, parameters = nnx.split(self.block)
        parameters = nnx.to_pure_dict(parameters)

        def layer(x, part):
            parameters, memory, index = part
            return nnx.merge(graph, parameters)(x, inputs.in_layer(index), *shared, memory=memory)

        if self._unrolled():
            axes.log_choice("layers", f"{self.layers} blocks written out, remat {self.remat}")
            return self._write_out(_checkpointed(layer, self.remat, in_scan=False), x, parameters, memory)
        axes.log_choice("layers", f"{self.layers} blocks scanned, remat {self.remat}")
        return lax.scan(
            _checkpointed(layer, self.remat, in_scan=True), x, (parameters, memory, jnp.arange(self.layers))
        )

    def _unrolled(self) -> bool:
        scope = axes.current()
        if self.unroll is None:
            return scope is not None and scope.placement.platform == "cpu" and self.layers <= 16
        return self.unroll

    def _write_out(self, layer, x: Array, parameters: Any, memory: Any) -> tuple[Array, Any]:
        memories = []
        for i, own in enumerate(_unstacked(parameters, self.layers)):
            x, new = layer(x, (own, jax.tree.map(lambda m, i=i: m[i], memory), i))
            memories.append(new)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *memories)


def check_remat(remat: Remat, names: Iterable[str] = REMAT_NAMES) -> None:
    """Raise `UserError` for a policy that does not exist, or a name that is none of `names`."""
    if isinstance(remat, str):
        if remat not in REMAT_POLICIES:
            raise UserError(f"remat {remat!r} is no policy.{suggest(remat, REMAT_POLICIES)} Or give a tuple of names")
        return
    for name in remat:
        if name not in names:
            raise UserError(f"remat: no activation is named {name!r}.{suggest(name, names)}")


def _named(block: nnx.Module) -> set[str]:
    """The names that a block's modules give to activations."""
    return {name for _, module in nnx.iter_modules(block) for name in getattr(module, "remat_names", ())}


def _checkpointed(layer, remat: Remat, in_scan: bool):
    if remat == "none":
        return layer
    kept = {"full": (), "minimal": REMAT_NAMES}.get(remat, remat) if isinstance(remat, str) else remat
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)


def _unstacked(parameters: Any, layers: int) -> list[Any]:
    """One tree for each layer. A split, not slices: its transpose is one concatenation, not a sum of padded arrays."""
    leaves, tree = jax.tree.flatten(parameters)
    parts = [lax.split(leaf, (1,) * layers) for leaf in leaves]
    return [tree.unflatten(lax.squeeze(p[i], (0,)) for p in parts) for i in range(layers)]
