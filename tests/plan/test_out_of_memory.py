"""Training that is too large is told before it starts, or when it has happened: what takes the memory, what helps."""

import math
import re

import jax
import pytest

from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.parallel.pipeline.rows import rows
from axon.plan.compiled import memory_parts
from axon.plan.memory import available, least_memory
from axon.plan.out_of_memory import check_memory, check_step, memory_explained
from axon.plan.remedies import WORTHWHILE, microbatches, remedies
from axon.plan.slots import slot_sizes
from axon.train.optimizers import AdamW, Constant, Group
from axon.train.step import Program
from models.llama import Llama

GIB = 2**30
RESERVED = "RESOURCE_EXHAUSTED: Attempting to reserve 9.50G at the bottom of memory. That was not possible."
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {}"


def program(layout=None, batch=16, scale=1, remat="none", **options):
    """On devices of this machine, its sizes times `scale`: nothing of it is made."""
    layout = layout or Layout({"data": 1})
    model = Llama(vocab=64 * scale, embed=32, layers=2, heads=4, kv_heads=4, mlp=64 * scale)
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    options |= {"execution": Execution(remat=remat), "devices": devices}
    return Program(model, layout, AdamW(Constant(1e-3)), batch=batch, seq=16, **options)


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so much memory is free on this machine."""
    return lambda size: monkeypatch.setattr("axon.plan.memory.free_memory", lambda: size)


def on_each_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.few(layout=[{"zero": 3, "rows": {"seq.residual": ("context", "tensor")}}])
@pytest.mark.parametrize("layout", [{}, {"zero": 1}, {"zero": 3, "rows": {"seq.residual": ("context", "tensor")}}])
def test_what_training_holds_is_what_its_arrays_take(layout, begun, rng):
    made = program(Layout({"data": 2, "tensor": 2}, **layout))
    state, parts = begun(made, rng), least_memory(made)
    assert parts["parameters"] == on_each_device(state.parameters)
    assert parts["optimizer"] == on_each_device(state.optimizer)
    assert parts["gradients"] == parts["parameters"]  # of the same dtype; ZeRO-1 leaves both whole
    assert parts["batch"] == 5 * 4 * 16 * 16 // 2


def test_frozen_parameters_have_neither_gradient_nor_state(begun, rng):
    layout, devices = Layout({"data": 1}), jax.devices()[:1]
    optimizer = AdamW(Constant(1e-3), groups=(Group("*/mlp/*", frozen=True),))
    model = Llama(vocab=64, embed=32, layers=2, heads=4, kv_heads=4, mlp=64)
    made = Program(model, layout, optimizer, batch=16, seq=16, devices=devices)
    whole, parts, mlp = least_memory(program()), least_memory(made), 2 * 3 * 4 * 32 * 64
    assert parts["parameters"] == whole["parameters"]
    assert parts["gradients"] == whole["gradients"] - mlp
    assert parts["optimizer"] == on_each_device(begun(made, rng).optimizer) == whole["optimizer"] - 2 * mlp


def test_a_model_that_is_too_large_is_refused_before_it_is_traced(free, monkeypatch):
    made = program(scale=1_000_000)
    monkeypatch.setattr(Program, "trace", lambda _: pytest.fail("traced"))
    needed = sum(least_memory(made).values())
    free(needed)
    check_memory(made)
    free(None)
    check_memory(made)
    free(needed - 1)
    with pytest.raises(UserError) as caught:
        check_memory(made)
    told = str(caught.value)
    assert re.search(r"needs \d+\.\d\d GiB of memory on each device, before any activation", told)
    assert f"parameters {least_memory(made)['parameters'] / GIB:.2f}" in told
    assert re.search(
        rf"  1\. {2 * 64e6 * 32 * 4 / GIB:.2f} GiB layers/block/mlp/\w+: layers 2 × .*mlp 64,000,000", told
    )
    assert "a smaller model, or a machine with more memory" in told
    assert "microbatches" not in told, "they would not help"


def test_the_devices_of_a_cpu_share_its_memory(free):
    made = program(Layout({"data": 4}), scale=10_000)
    free(4 * sum(least_memory(made).values()))
    check_memory(made)
    free(4 * sum(least_memory(made).values()) - 4)
    with pytest.raises(UserError, match=r"each of this machine's 4 devices has \d"):
        check_memory(made)
    assert available(made.placement) == sum(least_memory(made).values()) - 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_stage_of_zero_is_told_with_what_it_would_save(stage):
    def needs(zero):
        return sum(least_memory(program(Layout({"data": 4}, zero=zero), scale=1_000_000)).values())

    told = [line for line in remedies(program(Layout({"data": 4}, zero=stage), scale=1_000_000)) if "zero" in line]
    assert len(told) == 3 - stage
    for better, line in zip(range(stage + 1, 4), told, strict=True):
        assert line.startswith(f"Layout.zero = {better} ({stage} now): {(needs(stage) - needs(better)) / GIB:.2f} GiB")
        assert "over the 4 devices along 'data'" in line
    small = program(Layout({"data": 4}))
    assert sum(least_memory(small).values()) < WORTHWHILE
    assert not [line for line in remedies(small) if "zero" in line]


def test_what_would_help_is_of_this_runs_settings():
    def told(**options):
        return "\n".join(remedies(program(**options)))

    assert "Layout.microbatches = 2 (1 now): activations of 8 of a device's 16 sequences at a time, not of 16" in told()
    assert "Layout.microbatches = 6 (3 now)" in told(layout=Layout({"data": 2}, microbatches=3), batch=12)
    assert "microbatches" not in told(layout=Layout({"data": 2}, microbatches=8))
    assert "remat = 'full' (('query',) now)" in told(remat=("query",))
    assert "remat" not in told(remat="full")
    assert "remat" not in told(remat={"gate": "offload"})
    assert "zero" not in told(layout=Layout({"tensor": 4}), scale=1_000_000), (
        "there is no data parallelism to split over"
    )


@pytest.mark.full
@pytest.mark.draws(1)
def test_on_a_pipelines_stages_each_policy_is_told_with_what_it_keeps_and_whether_that_fits():
    made = program(Layout({"pipe": 2}, microbatches=8), batch=128, scale=40)
    pools = rows(made.evaluator.pipeline.table)[1]
    kept = [slot_sizes(made, remat=policy).total(pools) for policy in ("none", "minimal", "full")]
    assert kept == sorted(kept, reverse=True)
    told = [line for line in remedies(made, short=kept[0] - kept[1]) if "remat" in line]
    assert told[0].startswith("Execution.remat = 'minimal' ('none' now)")
    assert f" {kept[1] / GIB:.2f} GiB, not {kept[0] / GIB:.2f}, which fits" in told[0]
    stages = re.search(r"\(in use of stage 0: ([\d.]+), 1: ([\d.]+)\)", told[0])
    assert stages
    first, last = map(float, stages.groups())
    assert 0 < last <= first <= kept[1] / GIB + 0.005
    assert any(line.startswith("Execution.remat = (") for line in told)
    assert any("'offload'" in line and "in the host's memory" in line for line in told)
    assert all("not enough" in line for line in remedies(made, short=kept[0]) if "remat" in line)


@pytest.mark.parametrize(("times", "count"), [(1.5, 2), (3.5, 4), (5, 8), (1000, 16)])
def test_as_many_microbatches_are_proposed_as_activations_are_too_large(times, count):
    (line,) = microbatches(program(), times)
    assert line.startswith(f"Layout.microbatches = {count} (1 now)")


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_steps_temporaries_are_compared_with_what_is_left(free, begun, rng):
    made = program()
    compiled = made.lower().compile()
    parts = memory_parts(compiled)
    needed = parts["temporaries"] + parts["outputs"] - parts["aliased"]
    assert needed > on_each_device(begun(made, rng))
    free(needed)
    check_step(made, compiled)
    free(needed // 3)
    with pytest.raises(UserError, match=r"(?s)a step needs .* GiB of memory more .*Layout\.microbatches = 4 \(1 now\)"):
        check_step(made, compiled)


@pytest.mark.few(asked=(", where 12.50 GiB more were asked for", ""))
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (jax.errors.JaxRuntimeError(EXHAUSTED.format("12884901888 bytes.")), ", where 12.00 GiB more were asked for"),
        (jax.errors.JaxRuntimeError(EXHAUSTED.format("12.50GiB (rounded).")), ", where 12.50 GiB more were asked for"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"), ""),
        (jax.errors.JaxRuntimeError(RESERVED), ", where 9.50 GiB more were asked for"),
        (MemoryError(), ""),
    ],
)
def test_memory_that_runs_out_is_explained(error, asked):
    made = program(Layout({"data": 2}), scale=100_000)
    with pytest.raises(UserError) as caught, memory_explained(made):
        raise error
    lines = str(caught.value).splitlines()
    assert lines[0] == f"out of memory on each of this machine's 2 devices{asked}."
    assert re.match(r"In GiB on each device: parameters \d.*, optimizer \d.*, batch \d.*, gradients \d.*", lines[1])
    assert re.match(r"  1\. \d+\.\d\d GiB float32\[", lines[2])
    assert [line for line in lines if "Layout.zero = 3 (0 now)" in line]
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: out of memory of what was"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too many open streams"),
        ValueError("RESOURCE_EXHAUSTED: memory"),
    ],
)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught, memory_explained(program()):
        raise error
    assert caught.value is error
