"""Every kernel at every configuration, compiled by the TPU compiler for every chip that Axon names."""

import re

import pytest

from axon.chips import KERNEL_CHIPS
from scripts.bench.cases import attention
from scripts.bench.compiled import compile_case
from scripts.bench.kernel_costs import all_cases, lines, recorded, rows

SLOW = re.compile("Mixtral 8x7B|DeepSeek-V2-Lite|Llama 3 8B, (with )?gradients|decode, .*, pages of (16|128)")
"""Cases that are like another and take long; those of attention are shortened instead. All of them, whole, are slow."""

QUICK = [case for case in all_cases() if case.operation != "attention" and not SLOW.search(case.name)]
QUICK += attention.cases(shorter=64)

FEW = [
    case
    for case in QUICK
    if not re.search(
        "in blocks|prefill|verification|eighth|fp8|DeepSeek|rows that no|decode, (int8|float8|bfloat16, window)"
        "|GPT-2|Phi-3|Gemma|prefix|head_dim (64|96)|two cores|flash, Llama 3|a tensor",
        case.name,
    )
]
"""Each operation, forward and backward, in at least one configuration."""


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("libtpu", reason="needs its compiler: scripts/setup compilers")


@pytest.mark.few(chip=("v5e",), case=FEW)
@pytest.mark.some(chip=("v5e",))
@pytest.mark.some(chip=("tpu7x",), case=FEW)
@pytest.mark.parametrize("chip", KERNEL_CHIPS)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_configuration_compiles_for_every_chip(case, chip):
    check(case, chip)


def check(case, chip):
    made = compile_case(case, KERNEL_CHIPS[chip])
    assert made.refused is None
    assert (made.calls > 0) == (case.operation != "cross_entropy")
    assert made.vmem < 60 * 2**20
    return made


@pytest.mark.slow
@pytest.mark.parametrize("chip", KERNEL_CHIPS)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_what_is_recorded_of_a_case_is_what_the_compiler_says(case, chip):
    assert recorded()[str(case)][chip] == check(case, chip).vmem


def test_every_case_has_a_cost_and_a_record_for_every_chip():
    shown = rows()
    assert len(shown) == len({(row["operation"], row["case"]) for row in shown}) == len(all_cases())
    for row in shown:
        assert row["flops"] > 0
        assert row["intensity"] == pytest.approx(row["flops"] / row["bytes"])
        assert all("vmem_mib" in found for found in row["chips"].values())
    text = "\n".join(lines(shown))
    assert "compute is the limit" in text
    assert "memory is the limit" in text
