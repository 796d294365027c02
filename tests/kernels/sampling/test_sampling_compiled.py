"""The draw, compiled for TPUs and GPUs that are not here: which implementation it takes, and why."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from axon import axes
from axon.axes import per_device
from axon.kernels.sampling import sample
from axon.layout import Layout, Placement
from axon.plan.compiled import kernels
from axon.plan.hlo import Module
from axon.plan.topology import devices


@pytest.fixture(scope="module")
def compiled_for():
    """compiled_for(chips, batch, vocab): the program, and what was chosen."""

    def compile_(chips, batch, vocab):
        platform, compiler = ("cuda", "jax_cuda13_plugin") if chips.startswith("h200") else ("tpu", "libtpu")
        pytest.importorskip(compiler, reason="needs its compiler: scripts/setup compilers")
        placement = Placement.of(Layout(mesh={"data": 1}), devices(chips)[:1])
        scope = axes.Scope(placement)
        make = partial(jax.ShapeDtypeStruct, sharding=placement.sharding(()))
        key = jax.eval_shape(lambda: jax.random.key(0)).dtype
        operands = [make((batch, vocab), jnp.float32), make((batch,), key)]
        operands += [make((batch,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
        with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh), axes.activate(scope):
            # A function of its own: JAX would give back the trace of another scope for the same one.
            run = per_device(lambda *operands: sample(*operands), (jax.P(),) * len(operands), jax.P())
            program = jax.jit(run).trace(*operands).lower(lowering_platforms=(platform,)).compile()
        return program, scope.choices["sampling"]

    return compile_


@pytest.mark.few(chips=("v5e:2x2",))
@pytest.mark.parametrize("chips", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_tpu_searches_in_vmem_and_reads_no_sorted_logits(chips, compiled_for):
    program, chosen = compiled_for(chips, 16, 1000)
    assert chosen == "tpu, 16 × 1000 logits"
    module = Module.of(program.as_text())
    assert kernels(module) == {"sampling": 1}
    assert not any(one.opcode == "sort" for lines in module.computations.values() for one in lines)


@pytest.mark.full
def test_rows_that_do_not_fit_into_vmem_are_searched_in_hbm(compiled_for):
    program, chosen = compiled_for("v5e:2x2", 8, 600_000)
    assert chosen.startswith("xla, 8 × 600000 logits (not tpu: 57,606,144 bytes of VMEM for rows of 600000, over 50,")
    assert kernels(Module.of(program.as_text())) == {}


@pytest.mark.full
def test_a_gpu_searches_in_sixteen_passes_whose_number_is_a_constant(compiled_for):
    program, chosen = compiled_for("h200:1", 16, 1000)
    assert chosen.startswith("xla, 16 × 1000 logits")
    loops = [line for line in program.as_text().splitlines() if " while(" in line]
    assert len(loops) == 2
    assert all('"known_trip_count":{"n":"8"}' in line for line in loops)
