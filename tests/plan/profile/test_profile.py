"""Traced steps of a small model: all of the time is somebody's, and what is known of the program is seen."""

import jax
import pytest

from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.plan.profile import StepProfile
from axon.plan.profile.roles import COLLECTIVES, PRODUCTS, UNNAMED
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

STEPS = 2
LAYOUTS = {
    "data 4 × tensor 2, ZeRO-3": (Layout({"data": 4, "tensor": 2}, zero=3), {"data", "tensor"}),
    "data 8": (Layout({"data": 8}), {"data"}),
}


def traced(folder, layout, rng):
    """A profile of a model whose MLP has most of the products, and the program's HLO."""
    model = Llama(vocab=256, embed=64, layers=2, heads=4, kv_heads=4, mlp=1024)
    program = Program(model, layout, AdamW(Constant(1e-3)), batch=16, seq=64, execution=Execution(remat="full"))
    compiled = program.lower().compile()
    ids = rng.integers(0, 256, (16, 64))
    batch = program.place({name: ids.astype(spec.dtype) for name, spec in program.evaluator.specs.items()})
    state, _ = compiled(program.init(), batch)
    jax.block_until_ready(state)
    with jax.profiler.trace(str(folder)):
        for _ in range(STEPS):
            state, _ = compiled(state, batch)
            jax.block_until_ready(state)
    return StepProfile.read(folder, compiled.as_text(), STEPS, dict(program.placement.mesh.shape))


@pytest.fixture(params=LAYOUTS)
def profile(request, tmp_path, rng):
    layout, axes = LAYOUTS[request.param]
    return traced(tmp_path, layout, rng), axes


@pytest.mark.full
def test_all_of_a_steps_time_is_attributed_and_modules_and_mesh_axes_are_seen(profile):
    profile, axes = profile
    assert profile.devices == 8
    assert sum(row.seconds for row in profile.rows) + profile.idle == pytest.approx(profile.seconds)
    assert 0 <= profile.idle < profile.seconds
    by_module = profile.by(lambda row: row.role.module)
    assert {"mlp", "attention", "loss", "norm", "embedding", "update"} <= by_module.keys()
    assert by_module.get(UNNAMED, 0.0) < 0.02 * profile.seconds
    products = [row for row in profile.rows if row.role.kind == PRODUCTS]
    of = {m: sum(row.busy for row in products if row.role.module == m) for m in ("mlp", "attention")}
    assert of["mlp"] > of["attention"] > 0
    assert {row.role.phase for row in products} >= {"forward", "backward", "recomputed"}
    sent = [row.role.collective.mesh_axes(profile.mesh) for row in profile.rows if row.role.kind == COLLECTIVES]
    assert {axis for one in sent for axis in one} == axes


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no trace: an \.xplane\.pb"):
        StepProfile.read(tmp_path, "HloModule jit_f, x", 1, {})
