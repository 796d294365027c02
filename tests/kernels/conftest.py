"""What tests of Pallas Mosaic GPU kernels share."""

import json
import subprocess
import sys

import pytest


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
