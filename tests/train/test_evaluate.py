"""Evaluation of an objective: of any module, a stream between blocks or not."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes import ArraySpec, einsum
from axon.layout import Layout, LayoutError
from axon.nn import Param
from axon.runtime import Runtime
from axon.train.evaluate import Evaluator
from axon.train.objective import Objective, Sums


class Line(nnx.Module):
    """A linear map from `mlp` to `heads`: no axis of it is called `embed`."""

    def __init__(self, dims):
        self.weight = Param("mlp heads", dims)
        self.dims = dims

    def __call__(self, x):
        return einsum("batch seq mlp, mlp heads -> batch seq heads", x, self.weight)


class Undeclared(Line):
    """The same, which keeps no sizes."""

    def __init__(self, dims):
        self.weight = Param("mlp heads", dims)


@dataclass(frozen=True)
class Config:
    kind: type
    heads: int = 4

    def build(self):
        return self.kind({"mlp": 3, "heads": self.heads})


@dataclass(frozen=True)
class Squares(Objective):
    """The mean square of what a module makes of `x`."""

    unit = "point"

    def specs(self, batch, seq):
        return {"x": ArraySpec(("batch", "seq", "mlp"), (batch, seq, 3), jnp.float32)}

    def counts(self, batch):
        return {"tokens": jnp.float32(batch["x"].shape[0] * batch["x"].shape[1])}

    def sums(self, model, batch, key=None):
        total = jnp.sum(model(batch["x"]) ** 2)
        return Sums(total, {"loss": total})


@pytest.mark.parametrize("kind", [Line, Undeclared])
def test_a_module_without_an_embed_axis_is_evaluated(kind, rng):
    runtime = Runtime(Config(kind), Layout(rows={"mlp": None}), devices=jax.devices()[:1], seq=5)
    evaluator = Evaluator(runtime, Squares(), 2, 5)
    evaluator.check_layout()
    parameters = {"weight": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}
    x = rng.normal(size=(2, 5, 3)).astype(np.float32)
    total, count = evaluator(parameters, evaluator.place({"x": x}), {})["loss"]
    weight = np.asarray(parameters["weight"])
    assert float(total) == pytest.approx(np.square(x @ weight).sum(), rel=1e-5)
    assert float(count) == 10


def test_its_parameters_are_still_checked():
    runtime = Runtime(
        Config(Line, heads=3), Layout(mesh={"tensor": 2}, rows={"mlp": None}), devices=jax.devices()[:2], seq=5
    )
    with pytest.raises(LayoutError, match="parameter weight: axis 'heads' of size 3"):
        Evaluator(runtime, Squares(), 2, 5).check_layout()


@dataclass(frozen=True)
class OwnAxis(Squares):
    """Whose batch has an array with an axis that no parameter has, of size 7."""

    axis: str

    def specs(self, batch, seq):
        return super().specs(batch, seq) | {"y": ArraySpec(("batch", self.axis), (batch, 7), jnp.float32)}


def test_an_axis_of_the_batch_alone_needs_a_row_unless_it_is_never_split():
    runtime = Runtime(Config(Line), Layout(rows={"mlp": None}), devices=jax.devices()[:1], seq=5)
    with pytest.raises(LayoutError, match=r"the batch's y: axis 'points' .* Layout\.rows = \{'points': None\}"):
        Evaluator(runtime, OwnAxis("points"), 2, 5).check_layout()
    Evaluator(runtime, OwnAxis("_points"), 2, 5).check_layout()


def test_an_array_of_the_batch_that_does_not_divide_is_refused_by_name_before_anything_is_traced():
    layout = Layout(mesh={"tensor": 2}, rows={"mlp": None, "width": "tensor"})
    runtime = Runtime(Config(Line), layout, devices=jax.devices()[:2], seq=5)
    with pytest.raises(LayoutError, match=r"the batch's y: axis 'width' of size 7 .* Layout\.rows = \{'width': None\}"):
        Evaluator(runtime, OwnAxis("width"), 2, 5).check_layout()
