"""One attention layer as a program, for a mesh that may only be described."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon import axes
from axon.chips import xla_options
from axon.nn import Inputs, parameters

LOWERING = {"gpu": "cuda"}


@pytest.fixture(scope="session")
def lowered(bind):
    """lowered(placement, attention, batch, seq): a module's forward and backward, or its forward alone."""

    def of(placement, attention, batch, seq, *, gradients=True, compute=jnp.float32):
        specs = parameters(attention)

        def call(values, x, documents):
            return bind(attention, values)(x, Inputs(tokens=documents, positions=documents, documents=documents))[0]

        def with_gradients(values, x, documents):
            loss = lambda *given: jnp.sum(call(*given, documents).astype(jnp.float32) ** 2)  # noqa: E731
            return jax.grad(loss, argnums=(0, 1))(values, x)

        def abstract(names, shape, dtype, kind="activations"):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(names, kind))

        values = {
            tuple(path.split("/")): abstract(spec.axes, spec.shape, np.float32, "params")
            for path, spec in specs.items()
        }
        x = abstract(("batch", "seq", "embed"), (batch, seq, specs["out"].shape[-1]), compute)
        documents = abstract(("batch", "seq"), (batch, seq), np.int32)
        step = with_gradients if gradients else call
        options = {option.name: option.value for option in xla_options(placement.devices)[0]}
        scope = axes.Scope(placement, compute)
        with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh), axes.activate(scope):
            traced = jax.jit(lambda *given: step(*given), compiler_options=options).trace(
                nnx.traversals.unflatten_mapping(values), x, documents
            )
            return traced.lower(lowering_platforms=(LOWERING.get(placement.platform, placement.platform),))

    return of
