"""PiSSA: A·B begins as the best approximation of the weight, and the base as what remains of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Routing
from axon.nn.lora import LoRA
from axon.runtime import Runtime, flattened
from models.mixtral import Mixtral

MODEL = Mixtral(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, routing=Routing(4, 2))
PATHS = ("*/attention/out", "*/gate")


def matrices(value, groups, inputs):
    """`… inputs outputs` of the stack of all layers."""
    lead = 1 + groups
    return value.reshape(*value.shape[:lead], int(np.prod(value.shape[lead : lead + inputs])), -1)


def drawn(rng, shape, groups, inputs):
    """Values whose first three singular values are well above the others."""
    noise = matrices(rng.normal(size=shape), groups, inputs)
    left, right = (rng.normal(size=(*noise.shape[:-2], noise.shape[at], 3)) for at in (-2, -1))
    return (noise / 9 + left @ np.swapaxes(right, -1, -2)).reshape(shape).astype(np.float32)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout({"data": 1}), {}),
        (Layout({"data": 2, "tensor": 2}, zero=3), {"pissa_iterations": 4, "dora": True}),
    ],
    ids=["one", "split, randomised, DoRA"],
)
def test_the_factors_are_the_leading_singular_vectors(layout, more, rng):
    lora = LoRA(PATHS, rank=3, init="pissa", **more)
    devices = jax.devices()[: int(np.prod([*layout.mesh.values()]))]
    runtime = Runtime(MODEL, layout, devices=devices, transforms=(lora,))
    assert len(runtime.operands) == 2
    for path, operand in runtime.operands.items():
        groups, inputs = int("experts" in operand.axes), len(operand.inputs)
        value = drawn(rng, runtime.declared[path].shape, groups, inputs)
        parts = {name: np.asarray(part, np.float64) for name, part in flattened(runtime.derived(path, value)).items()}
        u, s, v = np.linalg.svd(matrices(value.astype(np.float64), groups, inputs), full_matrices=False)
        best = (u[..., :3] * s[..., None, :3]) @ v[..., :3, :]
        a = matrices(parts["a"], groups, inputs)
        b = parts["b"].reshape(*a.shape[:-2], 3, -1)
        np.testing.assert_allclose(lora.scale * a @ b, best, atol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(a, axis=-2), np.linalg.norm(b, axis=-1), rtol=1e-4)
        whole = operand.merged({name: jnp.asarray(part, jnp.float32) for name, part in parts.items()})
        np.testing.assert_allclose(whole, value, atol=2e-6)


def test_without_weights_to_start_from_it_is_refused():
    runtime = Runtime(MODEL, Layout({"data": 1}), devices=jax.devices()[:1], transforms=(LoRA(init="pissa"),))
    with pytest.raises(UserError, match=r"LoRA\.init = 'pissa'.*Train\.init_from"):
        runtime.initialise(0)
    with pytest.raises(UserError, match=r"pissa_iterations is of LoRA\.init"):
        LoRA(pissa_iterations=3)
