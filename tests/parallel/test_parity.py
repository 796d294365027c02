"""The numerics contract: loss and gradients do not depend on the layout, on its mode, or on microbatches.

Each mechanism alone, every pair, compositions of three and more; packed documents, padding and tied embeddings in all.
"""

import itertools
import math
import secrets
from typing import Any

import jax
import numpy as np
import pytest

from axon.layout import KINDS, Layout, sequence_parallel, tensor_3d
from axon.nn import Rope
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.llama import Llama

MODEL = Llama(vocab=61, vocab_multiple=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=64, tied=True)
KINDS_OF_BLOCK = Gemma(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    heads=8,
    kv_heads=4,
    mlp=64,
    head_dim=4,
    layers=3,
    window=9,
    local_rope=Rope(100.0),
    soft_cap=2.0,
    logit_soft_cap=3.0,
    qk_norm=True,
)
LATENTS = DeepSeek(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    layers=2,
    first_dense=2,
    heads=8,
    mlp=64,
    q_latent=16,
    kv_latent=12,
    nope_dim=6,
    rope_dim=4,
    value_dim=8,
)
ROWS, SEQ, STEPS = 16, 32, 10
DEVICES = 8
OPTIMIZER = AdamW(Constant(1e-3), eps=1e-4, clip=None)  # of gradients near 0 a small eps steps along the rounding

X, Y, Z = "x", "y", "z"
ORDER = ("replica", "pipe", "data", "z", "x", "y", "context", "ulysses", "tensor")
FIELDS_3D = tensor_3d(rows=Z, inputs=X, outputs=Y)

# Each mechanism as what it adds to a layout. Sizes of mesh axes are the least that it needs.
MECHANISMS: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data": 2}},
    "replica": {"mesh": {"replica": 2, "data": 2}, "zero": 3},
    "zero 1": {"mesh": {"data": 2}, "zero": 1},
    "zero 2": {"mesh": {"data": 2}, "zero": 2},
    "zero 3": {"mesh": {"data": 2}, "zero": 3},
    "microbatches": {"microbatches": 2},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"tensor": 2}, "rows": sequence_parallel()},
    "overlap": {"mesh": {"tensor": 2}, "rows": sequence_parallel(), "overlap": ("tensor",)},
    "copies of kv_heads": {"mesh": {"tensor": 4}, "replicate_kv": 2},
    "three-dimensional": {"mesh": {X: 2, Y: 2}, "rows": FIELDS_3D["rows"], "params": FIELDS_3D["params"]},
    "context": {"mesh": {"context": 2}, "context": "gather"},
    "ring": {"mesh": {"context": 2}, "context": "ring"},
    "ulysses": {"mesh": {"context": 2}, "context": "ulysses"},
    "usp": {"mesh": {"context": 2, "ulysses": 2}, "context": "usp"},
    "pipeline": {"mesh": {"pipe": 2}, "microbatches": 4},
}
UNLIKE = {  # two ways to split the same axes
    frozenset({"three-dimensional", other}) for other in ("tensor", "sequence", "overlap", "copies of kv_heads")
} | {frozenset(two) for two in itertools.combinations(("context", "ring", "ulysses", "usp"), 2)}
PAIRS = [
    pair
    for pair in itertools.combinations(MECHANISMS, 2)
    if frozenset(pair) not in UNLIKE and not all(name.startswith("zero") for name in pair)
]
COMPOSITIONS = [
    ("replica", "overlap", "microbatches"),
    ("zero 3", "sequence", "context"),
    ("zero 2", "copies of kv_heads", "microbatches"),
    ("zero 1", "overlap", "context", "microbatches"),
    ("zero 3", "three-dimensional", "microbatches"),
    ("replica", "sequence", "zero 2"),
    ("pipeline", "zero 3", "overlap"),
    ("zero 3", "sequence", "ring"),
    ("zero 1", "overlap", "ulysses", "microbatches"),
    ("sequence", "usp"),
    ("copies of kv_heads", "usp"),
    ("pipeline", "sequence", "ring"),
    ("pipeline", "zero 3", "ulysses"),
]


def combined(*names, **more) -> Layout:
    """The layout with all these mechanisms."""
    mesh: dict[str, int] = {}
    fields: dict[str, Any] = {"order": ORDER}
    for one in (MECHANISMS[name] for name in names):
        mesh |= {axis: max(size, mesh.get(axis, 1)) for axis, size in one.get("mesh", {}).items()}
        for name, value in one.items():
            if name != "mesh":
                fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    if mesh == {X: 2, Y: 2}:
        mesh[Z] = 2
    if math.prod(mesh.values()) > DEVICES:
        mesh[max(mesh, key=ORDER.index)] //= 2
    return Layout(mesh or {"data": 1}, **fields | more)


HOST = ("params", "optimizer")
AUTO = [combined("zero 3", "tensor", auto=True), combined("replica", "sequence", "microbatches", auto=True)]
ODD = [
    Layout({"data": 2, "tensor": 4}, rows={"kv_heads": None}),
    Layout({"data": 2, "tensor": 4}, rows={"heads": None}),
    Layout({"data": 2, "context": 4}, rows={"kv_seq": "context"}),
    Layout({"data": 2, "tensor": 2, "x": 2}, rows={"embed": "x"}, zero=3, order=("data", "tensor", "x")),
    Layout({"data": 4, "tensor": 2}, rows={"vocab": "data"}),
    Layout({"data": 8}, params={"mlp": "data"}),
    Layout({"data": 4, "tensor": 2}, params={"embed": "data"}, optimizer={"embed": None}),
    Layout({"data": 2, Z: 2, X: 2}, zero=3, **FIELDS_3D),
    Layout({"data": 4, "tensor": 2}, zero=2, rows=sequence_parallel(), microbatches=2, host=HOST),
    Layout({"data": 4, "tensor": 2}, params={"embed": "data"}, optimizer={"embed": None}, host=HOST),
    Layout({"data": 2, "tensor": 4}, rows=sequence_parallel(), auto=True),
]


def described(layout):
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    mode = "auto" if layout.auto else "explicit"
    host = ", on the host" * bool(layout.host)
    return f"{mesh}, zero {layout.zero}, {mode}, microbatches {layout.microbatches}, {dict(layout.rows)}{host}"


def joined(names):
    return " + ".join(names)


def train(program, state, batches):
    """First gradients by path, and losses and gradient norms of every step."""
    curve, gradients = [], None
    for batch in batches:
        state, metrics = program.step(state, program.place(batch))
        curve.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
        if gradients is None:  # Adam's first moment after one step is (1 − b1) of the gradient
            moment = state.optimizer["direction"].mu
            gradients = jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER.b1), moment)
    return gradients, np.asarray(curve)


def on_one_device(model, packed_batch, steps):
    """Model, seed, batches and initial state, drawn once for all layouts, and what one device makes of them."""
    seed = secrets.randbits(31)
    rng = np.random.default_rng(seed)
    batches = [packed_batch(rng, ROWS, SEQ, model.vocab) for _ in range(steps)]
    one = Program(model, Layout({"data": 1}), OPTIMIZER, batch=ROWS, seq=SEQ, seed=seed, devices=jax.devices()[:1])
    start = jax.device_get(one.init())
    return model, seed, batches, start, *train(one, one.init(), batches)


@pytest.fixture(scope="module")
def expected(packed_batch):
    return on_one_device(MODEL, packed_batch, STEPS)


@pytest.fixture(scope="module")
def expected_of_kinds(packed_batch):
    return on_one_device(KINDS_OF_BLOCK, packed_batch, 3)


@pytest.fixture(scope="module")
def expected_of_latents(packed_batch):
    return on_one_device(LATENTS, packed_batch, 3)


def assert_zero_splits(placement):
    for kind in KINDS[len(KINDS) - placement.layout.zero :]:
        assert "data" in placement.mesh_axes("embed", kind), kind


def check(layout, expected):
    model, seed, batches, start, gradients, curve = expected
    print(f"seed {seed}")
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    program = Program(model, layout, OPTIMIZER, batch=ROWS, seq=SEQ, devices=devices)
    assert_zero_splits(program.placement)
    state = jax.device_put(start, jax.tree.map(lambda a: a.sharding, program.abstract_state()))
    ours, our_curve = train(program, state, batches)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    for path, one in jax.tree_util.tree_leaves_with_path(ours):
        other = gradients
        for key in path:
            other = other[key.key]
        error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-3 * whole)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)
    np.testing.assert_allclose(our_curve, curve, rtol=1e-5)


@pytest.mark.few(name=("zero 1", "usp", "overlap", "three-dimensional"))
@pytest.mark.parametrize("name", MECHANISMS)
def test_gradients_and_ten_steps_do_not_depend_on_a_mechanism(name, expected):
    check(combined(name), expected)


@pytest.mark.full
@pytest.mark.parametrize("names", [("zero 3", "tensor"), ("zero 3", "sequence", "context")], ids=joined)
def test_gradients_and_steps_of_several_kinds_of_block_do_not_depend_on_the_layout(names, expected_of_kinds):
    check(combined(*names), expected_of_kinds)


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [*COMPOSITIONS[:2], ("zero 3", "tensor"), ("zero 3", "three-dimensional"), ("pipeline", "zero 3", "ulysses")],
    ids=joined,
)
def test_gradients_and_steps_with_latent_attention_do_not_depend_on_the_layout(names, expected_of_latents):
    check(combined(*names), expected_of_latents)


@pytest.mark.few(layout=AUTO[1:])
@pytest.mark.parametrize("layout", AUTO, ids=described)
def test_gradients_and_ten_steps_do_not_depend_on_the_mode(layout, expected):
    check(layout, expected)


@pytest.mark.few(names=COMPOSITIONS[1:2])
@pytest.mark.parametrize("names", COMPOSITIONS[:2], ids=joined)
def test_gradients_and_ten_steps_do_not_depend_on_a_composition(names, expected):
    check(combined(*names), expected)


@pytest.mark.slow
@pytest.mark.parametrize("names", COMPOSITIONS[2:], ids=joined)
def test_gradients_and_ten_steps_do_not_depend_on_any_composition(names, expected):
    check(combined(*names), expected)


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids=joined)
def test_gradients_and_ten_steps_do_not_depend_on_any_pair(names, expected):
    check(combined(*names), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ODD, ids=described)
def test_gradients_and_ten_steps_do_not_depend_on_rows_that_nobody_expected(layout, expected):
    check(layout, expected)
