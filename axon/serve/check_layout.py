"""What serving asks of a layout."""

from typing import Any

import jax
import jax.numpy as jnp

from axon.axes import axes_used
from axon.errors import UserError
from axon.layout import Layout, Placement, validate_program
from axon.nn import Inputs
from axon.runtime import Runtime, nested
from axon.serve.text_model import EncoderDecoder

OF_TRAINING = ("grads", "optimizer", "microbatches", "schedule", "pad_layers", "context", "overlap")
"""Fields of a layout that serving does not use."""

UNSPLIT = {"layers": "every device steps through all layers", "seq": "a sequence is whole on each device"}
"""What serving does not split, and why."""

FEW = 16
"""Positions of a sequence by which it is seen which axes a model names."""


def check_serves(runtime: Runtime) -> None:
    """Raise `UserError` for what serving does not use of a runtime's layout: settings of training, and devices that
    split layers or a sequence; and `LayoutError` for weights that it cannot shard, and for what has no effect."""
    _check_used(runtime.layout, runtime.placement)
    validate_program(runtime.placement, runtime.parameters, ("batch",), lambda: _axes_of(runtime))


def _check_used(layout: Layout, placement: Placement) -> None:
    values, default = vars(layout), vars(Layout())
    unused = [name for name in OF_TRAINING if values[name] != default[name]]
    if layout.zero in (1, 2):
        unused.append("zero")
    if unused:
        said = ", ".join(f"Layout.{name} = {values[name]!r}" for name in unused)
        raise UserError(f"{said}: of training alone, and without effect on serving; leave it out")
    for name, why in UNSPLIT.items():
        if axes := placement.mesh_axes(name):
            raise UserError(
                f"mesh axis {axes[0]!r} = {placement.mesh.shape[axes[0]]} splits {name!r}, and {why}: take it out of "
                "Layout.mesh, and split over 'tensor', 'expert' or 'data'"
            )


def _axes_of(runtime: Runtime) -> frozenset[str]:
    """All axes that the model's patterns name, of what comes before its head."""

    def hidden(values: Any, variables: Any, tokens: jax.Array) -> jax.Array:
        model, inputs = runtime.bind(values, variables), Inputs(tokens, tokens)
        if isinstance(model, EncoderDecoder):
            return model.decode(inputs, model.encode(inputs)[0], None)[0]
        return model.hidden(inputs)[0]

    parts = nested(runtime.parameters), nested(runtime.variables)
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.logical_shape, spec.dtype), parts)
    return axes_used(hidden, *shapes, jax.ShapeDtypeStruct((1, FEW), jnp.int32))
