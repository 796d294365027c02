"""Reading what `ptxas` and Mosaic report of a kernel."""

import pytest

from scripts.bench.ptxas_report import KernelReport, parse_report

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'axon_attention_dq_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for axon_attention_dq_mosaic_gpu_kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, 1 bytes smem
{warnings}ptxas info    : Compile time = 89.4 ms
"""
WARNING = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in function 'axon_attention_dq_mosaic_gpu_kernel'"
)
RESOURCES = "Resources(smem_scratch_bytes={shared}, tmem_scratch_cols=0, barrier_counts=Counter({{}}))"


@pytest.mark.parametrize("warnings", [(), (WARNING,)])
def test_a_report_says_registers_spills_shared_memory_and_serialised_wgmma(warnings, rng):
    registers, stores, loads, shared = (int(n) for n in rng.integers(0, 2**16, 4))
    text = "".join(f"{line}\n" for line in warnings)
    ptxas = REPORT.format(stack=8, stores=stores, loads=loads, registers=registers, warnings=text)
    report = parse_report(ptxas, RESOURCES.format(shared=shared))
    assert report == KernelReport("axon_attention_dq", registers, stores + loads, shared, warnings)


def test_what_is_no_report_is_an_error():
    with pytest.raises(ValueError, match="not a report"):
        parse_report("", "")
