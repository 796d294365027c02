"""Attention under every `Layout.context` against attention on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import in_block, shard
from axon.kernels.attention import Causal, Prefix, SameDocument, Window
from axon.nn import Attention, Inputs, Rope

SEQ = 32
FULL, LOCAL, PREFIX = Causal() & SameDocument(), Causal() & SameDocument() & Window(11), Prefix(9) & SameDocument()
DIMS = {"embed": 16, "heads": 8, "kv_heads": 4, "head_dim": 4}
BLOCK = "block"
LAYOUTS = [
    {"mesh": {"context": 4, "tensor": 2}, "context": "ring"},
    {"mesh": {"context": 2, "tensor": 4}, "context": "ring", "replicate_kv": 2},
    {"mesh": {"context": 2, "tensor": 2}, "context": "ring", "rows": {"kv_heads": None}},
    {"mesh": {"data": 2, "context": 2, "tensor": 2}, "context": "ulysses"},
    {"mesh": {"context": 8}, "context": "ulysses"},
    {"mesh": {"context": 2, "tensor": 4}, "context": "ulysses", "replicate_kv": 2},
    {"mesh": {"context": 2, "ulysses": 2, "tensor": 2}, "context": "usp"},
    {"mesh": {"context": 2, "ulysses": 4}, "context": "usp"},
    {"mesh": {"context": 2, "ulysses": 2}, "context": "ring"},
    {"mesh": {"context": 2, "ulysses": 2}, "context": "gather"},
    {"mesh": {"context": 4}, "context": "ring", "auto": True},
    {"mesh": {"context": 2, "ulysses": 2}, "context": {BLOCK: "usp", "other": "ring"}},
    {"mesh": {"context": 2, "ulysses": 2}, "context": {BLOCK: "gather", "other": "usp"}},
    {"mesh": {"context": 2}, "context": {BLOCK: "ulysses", "other": "ring"}},
    {"mesh": {"context": 4}, "context": {BLOCK: "gather", "other": "ulysses"}},
]


def described(layout):
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout["mesh"].items())
    return f"{layout['context']}, {mesh}" + ", rows" * ("rows" in layout) + ", auto" * ("auto" in layout)


def run(bind, attention, placement, values, x, documents):
    """Output in natural order, and gradients of its sum of squares for `values` and `x`."""
    stored = placement.stored_positions(x.shape[1])
    positions = np.broadcast_to(stored.astype(np.int32), documents.shape)

    def call(values, x):
        inputs = Inputs(documents, shard(positions, "batch seq"), shard(documents[:, stored], "batch seq"))
        with in_block(BLOCK):
            out = bind(attention, values)(shard(x[:, stored], "batch seq embed"), inputs)[0]
        return shard(out, "batch _seq embed")[:, np.argsort(stored)]

    def objective(values, x):
        out = call(values, x)
        return jnp.sum(out**2), out

    gradients, out = jax.grad(objective, argnums=(0, 1), has_aux=True)(values, x)
    return out, gradients


def draw(rng):
    x = rng.normal(size=(2, SEQ, DIMS["embed"])).astype(np.float32)
    return x, np.sort(rng.integers(0, 3, (2, SEQ)), axis=1).astype(np.int32)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(mask=(LOCAL,), layout=[LAYOUTS[i] for i in (0, 2, 3, 4, 6, 8, 9, 10, 12, 14)])
@pytest.mark.parametrize("mask", [FULL, LOCAL, PREFIX], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=described)
def test_attention_does_not_depend_on_how_positions_meet(layout, mask, rng, placed, compiled, bind, random_parameters):
    attention = Attention(DIMS, mask, rope=Rope(), sinks=True, soft_cap=2.0)
    values, drawn, placement = random_parameters(attention, rng), draw(rng), placed(**layout)
    ours = compiled(placement, lambda *given: run(bind, attention, placement, *given), values, *drawn)
    theirs = compiled(placed(), lambda *given: run(bind, attention, placed(), *given), values, *drawn)
    for one, other in zip(*(jax.tree.leaves(jax.device_get(results)) for results in (ours, theirs)), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * max(np.linalg.norm(other), 1.0)
