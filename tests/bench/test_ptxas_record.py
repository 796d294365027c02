"""The record of what `ptxas` says of our kernels."""

from scripts.bench.ptxas import all_gpu_cases, recorded


def test_what_is_recorded_is_of_every_configuration():
    assert list(recorded()) == [str(case) for case in all_gpu_cases()]
