"""A state saved on any layout is restored on any other, bit for bit and with that layout's shardings: a checkpoint has
arrays by path, with logical layers and axes, and nothing of the mesh."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from axon.axes import ArraySpec
from axon.checkpoint import Checkpoints, Reader, Store
from axon.checkpoint.tree import flat
from axon.layout import Execution, Layout
from axon.nn import Routing
from axon.parallel.pipeline import DualPipeV, Interleaved, OneFOneB, ZeroBubbleH1
from axon.run.restore import restore_state
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama
from models.mixtral import Mixtral

DENSE = Llama(vocab=64, embed=16, layers=4, heads=4, kv_heads=4, mlp=32)
EXPERTS = Mixtral(vocab=64, embed=16, layers=2, heads=4, kv_heads=4, mlp=32, routing=Routing(4, top_k=2))
THREE = replace(DENSE, layers=3)


def pipeline(stages: int, schedule: Any, **fields: Any) -> Layout:
    return Layout({"pipe": stages, **fields.pop("mesh", {})}, schedule=schedule, microbatches=4, **fields)


ONE = Layout({"data": 1})
SPLIT = Layout({"data": 2, "tensor": 2}, zero=3)
CHANGES = {
    "mesh shape": (DENSE, Layout({"data": 4, "tensor": 2}), Layout({"data": 2, "tensor": 4})),
    "fewer devices": (DENSE, Layout({"data": 4, "tensor": 2}, zero=3), ONE),
    "more devices": (DENSE, ONE, Layout({"data": 4, "tensor": 2}, zero=3)),
    "ZeRO 1 to 3": (DENSE, Layout({"data": 4}, zero=1), Layout({"data": 4}, zero=3)),
    "ZeRO 3 to none": (DENSE, Layout({"data": 4}, zero=3), Layout({"data": 4})),
    "stages": (DENSE, pipeline(2, OneFOneB()), pipeline(4, OneFOneB())),
    "schedule": (DENSE, pipeline(2, OneFOneB()), pipeline(2, Interleaved(2))),
    "schedule and stages, with ZeRO": (
        DENSE,
        pipeline(2, DualPipeV(), mesh={"data": 2}, zero=1),
        pipeline(4, ZeroBubbleH1(), mesh={"data": 2}),
    ),
    "no stages": (DENSE, pipeline(4, Interleaved(1), mesh={"data": 2}), SPLIT),
    "stages that do not divide the layers": (THREE, SPLIT, pipeline(2, OneFOneB(), pad_layers=True)),
    "scanned to unrolled": (DENSE, SPLIT, SPLIT),
    "expert placement": (
        EXPERTS,
        Layout({"data": 2, "expert": 4}, zero=1),
        Layout({"expert": 2, "tensor": 2}, zero=3),
    ),
    "no expert placement": (EXPERTS, Layout({"expert": 4}), Layout({"data": 2, "tensor": 2}, zero=3)),
    "Explicit to Auto": (DENSE, SPLIT, replace(SPLIT, auto=True)),
    "Auto to Explicit": (DENSE, replace(SPLIT, auto=True), SPLIT),
}
UNROLLED = {"scanned to unrolled": (False, True)}


def program(model: Any, layout: Layout, unroll: bool | None) -> Program:
    options: Any = {"execution": Execution(unroll=unroll), "devices": jax.devices()[: math.prod(layout.mesh.values())]}
    return Program(model, layout, AdamW(Constant(1e-3)), batch=8, seq=8, **options)


def drawn(spec: ArraySpec, rng: np.random.Generator) -> np.ndarray:
    """Any values, without padding."""
    return rng.integers(0, 2**31, spec.logical_shape).astype(spec.dtype)


def placed(values: dict[str, np.ndarray], made: Program) -> Any:
    """A program's state with these values by path, padded as it asks."""
    specs, leaves = flat(made.specs), flat(made.abstract_state())

    def leaf(path: str) -> jax.Array:
        missing = [(0, size - have) for size, have in zip(specs[path].shape, values[path].shape, strict=True)]
        return jax.device_put(np.pad(values[path], missing) if missing else values[path], leaves[path].sharding)

    return jax.tree.unflatten(jax.tree.structure(made.abstract_state()), [leaf(path) for path in leaves])


DEFAULT = ("ZeRO 1 to 3", "schedule and stages, with ZeRO", "Auto to Explicit")


@pytest.mark.few(change=DEFAULT)
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_saved_on_one_layout_is_restored_on_another(change, rng, tmp_path):
    model, before, after = CHANGES[change]
    unrolled = UNROLLED.get(change, (None, None))
    saving, restoring = map(program, (model, model), (before, after), unrolled)
    values = {path: drawn(spec, rng) for path, spec in flat(saving.specs).items()}
    with Store(tmp_path, Checkpoints(asynchronous=False)) as store:
        store.save(1, placed(values, saving), {}, saving.specs)
    found, _ = restore_state(Reader(tmp_path), restoring)
    for path, expected in flat(placed(values, restoring)).items():
        array = flat(found)[path]
        assert np.asarray(array).tobytes() == np.asarray(expected).tobytes(), path
        assert array.sharding.is_equivalent_to(expected.sharding, array.ndim), path
