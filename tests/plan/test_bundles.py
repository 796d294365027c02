"""Cycles of a program's Pallas kernels, from the bundles that are recorded of their tiles."""

import pytest

from axon.chips import KERNEL_CHIPS
from axon.plan import bundles
from axon.plan.hlo import Module

CALL = (
    'custom-call(%a), custom_call_target="tpu_custom_call", '
    'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{flops}","bytes_accessed":"{moved}"}}}}}}'
)
FUSED = (
    'custom-call(%a), custom_call_target="tpu_custom_call", '
    'backend_config={{"custom_call_config": {{"cost_estimate": {{'
    '\n"bytes_accessed":{moved},\n"flops":{flops},\n"transcendentals":0\n}}, "serialization_format": 1}}}}'
)
"""As XLA writes a call that it fused with what makes its operand."""

PROGRAM = """HloModule m

%body (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %transpose_jvp__axon_attention_backward__.3 = f32[4]{{0}} {backward}
}}

%condition (p.1: f32[4]) -> pred[] {{
  %p.1 = f32[4]{{0}} parameter(0)
  ROOT %always = pred[] constant(true)
}}

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %axon_attention_forward.1 = f32[4]{{0}} {forward}
  %unheard_of.1 = f32[4]{{0}} {forward}
  ROOT %loop = f32[4]{{0}} while(%a), condition=%condition, body=%body, {trips}
}}
"""


@pytest.mark.parametrize("chip", [name for name, chip in KERNEL_CHIPS.items() if chip.clock])
def test_a_call_takes_its_tiles_cycles_as_often_as_it_runs(chip, rng):
    forward, backward = (int(n) for n in rng.integers(10**9, 10**12, 2))
    calls = {"forward": CALL.format(flops=forward, moved=8), "backward": CALL.format(flops=backward, moved=8)}
    text = PROGRAM.format(**calls, trips='backend_config={"known_trip_count":{"n":"5"}}')
    found = bundles.kernel_cycles(Module.of(text), chip)
    recorded, cores = bundles.recorded(), KERNEL_CHIPS[chip].cores
    for name, flops, times, keys, products in (("forward", forward, 1, 1024, 2), ("backward", backward, 5, 512, 5)):
        tile = 2 * products * 1024 * keys * 128
        issued = recorded[f"attention: {name}, whole tile"]["bundles"][chip]
        busy = tile / (KERNEL_CHIPS[chip].peak / (KERNEL_CHIPS[chip].clock or 1) / cores)
        assert found.pop(f"axon_attention_{name}") == pytest.approx(
            times * flops / tile * max(issued, busy) / cores, rel=1e-6, abs=times
        )
    assert not found, "a kernel without a recorded tile is left out"


@pytest.mark.parametrize("chip", [name for name, chip in KERNEL_CHIPS.items() if chip.clock])
def test_a_call_that_computes_little_takes_as_long_as_its_bytes(chip, rng):
    moved = int(rng.integers(10**9, 10**10))
    calls = {name: CALL.format(flops=1000, moved=moved) for name in ("forward", "backward")}
    found = bundles.kernel_cycles(Module.of(PROGRAM.format(**calls, trips="")), chip)
    seconds = found["axon_attention_forward"] / (KERNEL_CHIPS[chip].clock or 1)
    assert seconds == pytest.approx(moved / KERNEL_CHIPS[chip].bandwidth, rel=1e-6)


@pytest.mark.parametrize("chip", KERNEL_CHIPS)
def test_no_kernel_is_faster_than_the_matrix_units(chip):
    for rate in bundles.flops_per_cycle(chip).values():
        assert 0 < rate <= KERNEL_CHIPS[chip].peak / (KERNEL_CHIPS[chip].clock or 1)
    assert bool(bundles.flops_per_cycle(chip)) == (KERNEL_CHIPS[chip].clock is not None)


def test_a_call_that_xla_fused_counts_as_one_that_it_did_not(rng):
    costs = [{"flops": int(rng.integers(10**9, 10**12)), "moved": int(rng.integers(1, 10**9))} for _ in range(2)]
    alone, fused = (
        bundles.kernel_cycles(
            Module.of(PROGRAM.format(forward=form.format(**costs[0]), backward=form.format(**costs[1]), trips="")),
            "v6e",
        )
        for form in (CALL, FUSED)
    )
    assert alone == fused
    assert len(fused) == 2
