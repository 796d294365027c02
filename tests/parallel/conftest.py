"""Ways to send tokens to experts, on CPUs too."""

import itertools

import jax.numpy as jnp
import pytest
from jax import lax

from axon.parallel.expert import Local, Padded, Ragged, ragged


def emulated(operand, output, start, sent, to, received, *, axis_name):
    """`lax.ragged_all_to_all`, which CPUs lack: every device looks at what all others send."""
    operands, *runs = lax.all_gather((operand, start, sent, to), axis_name)
    devices, me, place = len(operands), lax.axis_index(axis_name), jnp.arange(output.shape[0])
    start, sent, to = (run.reshape(devices, devices, -1)[:, me] for run in runs)  # device, its runs for this one
    for device, run in itertools.product(range(devices), range(start.shape[1])):
        offset = place - to[device, run]
        is_here = (offset >= 0) & (offset < sent[device, run])
        found = operands[device][jnp.clip(start[device, run] + offset, 0, operands.shape[1] - 1)]
        output = jnp.where(is_here[:, None], found, output)
    return output


@pytest.fixture
def ways(monkeypatch):
    monkeypatch.setattr(ragged.lax, "ragged_all_to_all", emulated)
    return {"local": Local, "padded": Padded, "ragged": Ragged}
