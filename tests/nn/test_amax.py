"""Recorded magnitudes: those of `x`, of the weight and of `dy` over the whole batch, and nothing else is changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes import Reporting, einsum
from axon.axes.statistics import combined_devices, largest_magnitude
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Param
from axon.nn.amax import RecordAmax
from axon.nn.quantized import Quantize
from axon.nn.weight_transform import transform_weights
from axon.parallel.outer import DiLoCo
from axon.runtime import Runtime, flattened
from axon.train.optimizers import AdamW, Constant, OneBitAdam
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
OPTIMIZER = AdamW(Constant(1e-3), eps=1e-4)
BATCH, SEQ = 8, 16
KEY = "layers/block/attention/key/amax"


class Holder(nnx.Module):
    """A module that uses its weight several times."""

    def __init__(self):
        self.weight = Param("embed mlp", {"embed": 6, "mlp": 5})

    def __call__(self, x):  # uses batch seq embed
        return [einsum("batch seq embed, embed mlp -> batch seq mlp", one, self.weight) for one in x]


class Built:
    def build(self):
        return Holder()


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2, "context": 2}])
def test_the_largest_magnitudes_of_all_uses_are_recorded(mesh, rng):
    devices = jax.devices()[: 2 ** (2 * len(mesh) - 2)]
    runtime = Runtime(Built(), Layout(mesh), transforms=[RecordAmax("weight")], devices=devices)
    x, c = (rng.normal(0, 10.0 ** rng.uniform(-3, 3), (3, 4, 8, n)).astype(np.float32) for n in (6, 5))
    w = rng.normal(size=(6, 5)).astype(np.float32)

    def loss(report, w):
        module = runtime.bind({"weight": {"base": w}}, {"weight": {"amax": Reporting(jnp.zeros((3, 1)), report)}})
        return sum(jnp.vdot(y, weights) for y, weights in zip(module(x), c, strict=True))

    empty = np.zeros((*runtime.placement.mesh.shape.values(), 3), np.float32)
    empty, w = jax.device_put((empty, w), jax.NamedSharding(runtime.placement.mesh, jax.P()))
    with runtime.tracing():
        seen, dw = runtime.jit(jax.grad(loss, (0, 1)))(empty, w)
    np.testing.assert_allclose(np.max(np.reshape(seen, (-1, 3)), 0), [np.abs(o).max() for o in (x, w, c)], rtol=1e-6)
    np.testing.assert_allclose(dw, np.einsum("ubse,ubsm->em", x, c), rtol=1e-4, atol=1e-4 * np.abs(dw).max())


def test_what_is_not_a_number_is_recorded_as_such(rng):
    x = rng.normal(size=(16, 9)).astype(np.float32)
    assert jax.jit(largest_magnitude)(x) == np.abs(x).max()
    reports = np.abs(rng.normal(size=(2, 4, 3))).astype(np.float32)
    x[rng.integers(16), rng.integers(9)] = reports[1, 2, 0] = np.nan
    for dtype in (np.float32, jnp.bfloat16):
        assert np.isnan(jax.jit(largest_magnitude)(x.astype(dtype)))
    combined = jax.jit(lambda reports: combined_devices(reports, (3,), 1))(reports)
    np.testing.assert_array_equal(combined, reports.max(axis=1))
    assert np.isnan(combined[1, 0])


def stepped(layout, packed_batch, seed, steps=2, optimizer=OPTIMIZER, **options):
    """Variables and losses of some steps."""
    transforms = options.pop("transforms", (RecordAmax(history=3),))
    program = Program(MODEL, layout, optimizer, batch=BATCH, seq=SEQ, transforms=transforms, **options)
    state, rng, losses = program.init(), np.random.default_rng(seed), []
    for _ in range(steps):
        state, metrics = program.step(state, program.place(packed_batch(rng, BATCH, SEQ, MODEL.vocab)))
        losses.append(float(metrics["loss"]))
    return flattened(jax.device_get(state.variables)), losses


@pytest.mark.full
def test_nothing_else_changes_and_the_latest_is_in_front(packed_batch, seed):
    layout = Layout({"data": 8}, zero=3)
    recorded, losses = stepped(layout, packed_batch, seed)
    before, _ = stepped(layout, packed_batch, seed, steps=1)
    assert losses == stepped(layout, packed_batch, seed, transforms=())[1]
    for path, history in recorded.items():
        assert np.all(history[..., :2] > 0)
        assert not np.any(history[..., 2])
        np.testing.assert_array_equal(history[..., 1], before[path][..., 0], err_msg=path)


@pytest.mark.full
@pytest.mark.parametrize("method", ["outer", "one bit"])
def test_the_largest_of_all_replicas_is_recorded(method, packed_batch, seed):
    """In the first step all replicas have the same weights: `x` and `w` are those of a plain step."""
    options = {"outer": DiLoCo(every=2)} if method == "outer" else {"optimizer": OneBitAdam(Constant(1e-3), warmup=1)}
    found, _ = stepped(Layout({"replica": 2, "data": 4}), packed_batch, seed, steps=1, **options)
    expected, _ = stepped(Layout({"data": 8}), packed_batch, seed, steps=1)
    for path, history in expected.items():
        np.testing.assert_allclose(found[path][:, :2], history[:, :2], rtol=1e-5, err_msg=path)


def test_what_stands_in_a_weights_place_is_refused_by_name():
    with pytest.raises(UserError, match=r"RecordAmax.*QuantizedWeight.*before"):
        transform_weights(MODEL.build(), [Quantize("int8"), RecordAmax()])


def test_a_weight_outside_of_a_pipelines_blocks_is_refused_by_name(packed_batch, seed):
    layout = Layout({"pipe": 2, "data": 4}, microbatches=2)
    with pytest.raises(UserError, match=r"head/amax.*Train.transforms"):
        stepped(layout, packed_batch, seed, transforms=(RecordAmax("head"),))
