"""Whether a process is one of several, told from its environment alone."""

import random

import pytest

from axon.errors import UserError
from axon.launch.cluster import Process

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def test_without_a_launcher_and_without_slurm_it_is_alone():
    assert Process.found({"HOME": "/", "PATH": "/bin"}) is None


def test_what_a_launcher_says_is_understood():
    count = random.randint(2, 99)
    for process in (Process(random.randrange(count), count, "127.0.0.1:4000", 12), Process(1, 2, "node3:4000")):
        assert Process.found(process.environment()) == process


def test_a_step_of_several_slurm_tasks_is_joined_where_jax_finds_the_rest():
    assert Process.found(SLURM) == Process(5, 8, coordinator=None)


@pytest.mark.parametrize("missing", SLURM)
def test_a_slurm_batch_script_that_is_no_step_is_alone(missing):
    assert Process.found({name: value for name, value in SLURM.items() if name != missing}) is None


def test_one_slurm_task_is_alone():
    assert Process.found(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_launcher_inside_of_slurm_counts_before_slurm():
    inner = Process(1, 2, "127.0.0.1:4000", 12)
    assert Process.found(SLURM | inner.environment()) == inner


def test_a_variable_that_is_no_number_is_a_mistake_that_names_it():
    with pytest.raises(UserError, match="AXON_PROCESSES is 'two'"):
        Process.found({"AXON_PROCESS": "0", "AXON_PROCESSES": "two"})


@pytest.mark.parametrize(
    "address", ["nonsense", "", "node3", "node3:", "node3:70000", "node3:0", "no de:4000", ":4000"]
)
def test_an_address_that_is_none_is_a_mistake_that_names_its_variable(address):
    environ = {"AXON_PROCESS": "0", "AXON_PROCESSES": "2", "AXON_COORDINATOR": address}
    with pytest.raises(UserError, match=f"AXON_COORDINATOR is '{address}'; expected host:port"):
        Process.found(environ)


@pytest.mark.parametrize("address", ["node3:4000", "127.0.0.1:1", "[::1]:65535"])
def test_an_address_is_a_host_and_a_port(address):
    assert Process.found({"AXON_PROCESS": "0", "AXON_PROCESSES": "2", "AXON_COORDINATOR": address}) == Process(
        0, 2, address
    )
