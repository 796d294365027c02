"""ViT: published sizes, and that neither layout nor dropout's key depends on the mesh."""

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.nn import parameters
from axon.train.classification import Classification
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.vit import ViT

TINY = {"image": 8, "patch": 2, "channels": 2, "embed": 16, "layers": 1, "heads": 4, "mlp": 32, "classes": 5}


def test_the_base_model_has_the_published_number_of_parameters():
    """google/vit-base-patch16-224."""
    assert sum(spec.size for spec in parameters(ViT().build()).values()) == 86_567_656


def step(layout, pool):
    model = ViT(**TINY, pool=pool, dropout=0.1)
    devices = jax.devices()[: int(np.prod([*layout.mesh.values()]))]
    objective = Classification(8, 8, 2, smoothing=0.1)
    program = Program(
        model, layout, AdamW(Constant(1e-2)), batch=8, seq=model.seq, objective=objective, devices=devices
    )
    random = np.random.default_rng(0)
    images, labels = random.standard_normal((8, 8, 8, 2)), random.integers(0, 5, 8)
    batch = {"image": images.astype(np.float32), "label": labels.astype(np.int32), "weights": np.ones(8, np.float32)}
    batch["weights"][-1] = 0
    _, metrics = program.step(program.init(), program.place(batch))
    return [float(metrics[name]) for name in ("loss", "grad_norm", "accuracy", "tokens")]


@pytest.mark.full
@pytest.mark.some(pool=("token",))
@pytest.mark.parametrize(
    ("mesh", "pool", "options"),
    [
        ({"data": 4, "tensor": 2}, "token", {"zero": 3, "microbatches": 2}),
        ({"data": 2, "context": 4}, "mean", {}),
        ({"data": 2}, "mean", {"auto": True}),
    ],
)
def test_a_step_does_not_depend_on_the_layout(mesh, pool, options):
    np.testing.assert_allclose(
        step(Layout(mesh=mesh, **options), pool), step(Layout(mesh={"data": 1}), pool), rtol=1e-5
    )
