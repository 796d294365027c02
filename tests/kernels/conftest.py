"""What tests of Pallas kernels share."""

import json
import subprocess
import sys

import pytest

from scripts.bench.ptxas import figures, recorded
from scripts.bench.ptxas_report import compile_for_gpu


@pytest.fixture(scope="session")
def run_script():
    """run_script(script, case): what a script prints, last, of a case, both in JSON; ends after 5 minutes.

    In a process of its own: in the interpreter of such kernels a wait that nothing ends hangs.
    """

    def run(script, case):
        command = [sys.executable, str(script), json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def watched():
    """`interpret=` of a TPU kernel: a read outside of what it was given raises, and a race fails the test."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    yield pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")
    found = interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    assert not found


@pytest.fixture
def gpu_compiler():
    """The compiler of programs for GPUs: a test that needs it is skipped without."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs its compiler: scripts/setup compilers")


@pytest.fixture
def check_compiled(gpu_compiler):
    """check_compiled(case, *names): as `case` compiles for its GPU it is these kernels, as recorded and none slowed.

    That is: no register is spilled, no `wgmma` serialised, and the shared memory is what a block can have.
    """

    def check(case, *names):
        made = compile_for_gpu(case)
        assert made.refused is None
        assert sorted(one.name for one in made.kernels) == sorted(names)
        for one in made.kernels:
            assert (one.spilled, one.serialised) == (0, ())
            assert one.shared < 227 * 2**10
        assert figures(case, made) == recorded()[str(case)], "axon bench kernels --compile records it anew"

    return check
