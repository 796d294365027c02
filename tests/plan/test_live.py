"""What a program holds at its peak, against its compiler's own assignment of memory."""

import jax
import jax.numpy as jnp
import pytest

from axon.plan.hlo import Module
from axon.plan.live import live_at_peak

TEXT = """HloModule m

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %inner = f32[100]{0} broadcast(%p)
  ROOT %next = f32[4]{0} reduce(%inner)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %early = f32[50]{0} broadcast(%a)
  %small = f32[4]{0} reduce(%early)
  %kept = f32[20]{0} broadcast(%a)
  %written = f32[20]{0} dynamic-update-slice(%kept, %small)
  %loop = f32[4]{0} while(%small), condition=%c, body=%body
  %view = f32[20]{0} bitcast(%written)
  %used = f32[4]{0} add(%view, %loop)
  ROOT %out = f32[8]{0} broadcast(%used)
}
"""


def test_arrays_live_from_what_makes_them_to_what_reads_them_last_in_loops_too():
    assert live_at_peak(Module.of(TEXT)) == {"small": 16, "kept": 80, "inner": 400, "next": 16}


CARRIED = """HloModule m

%body (p: (f32[4], f32[30])) -> (f32[4], f32[30]) {
  %p = (f32[4]{0}, f32[30]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %y = f32[30]{0} get-tuple-element(%p), index=1
  ROOT %both = (f32[4]{0}, f32[30]{0}) tuple(%x, %y)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %x = f32[4]{0} broadcast(%a)
  %y = f32[30]{0} broadcast(%a)
  %both = (f32[4]{0}, f32[30]{0}) tuple(%x, %y)
  %loop = (f32[4]{0}, f32[30]{0}) while(%both), condition=%c, body=%body
  %last = f32[4]{0} get-tuple-element(%loop), index=0
  %large = f32[500]{0} broadcast(%a)
  %used = f32[4]{0} reduce(%large)
  ROOT %out = f32[8]{0} add(%used, %last)
}
"""


def test_of_what_a_loop_carries_only_what_is_read_after_it_lives_on():
    assert live_at_peak(Module.of(CARRIED)) == {"x": 16, "large": 2000, "used": 16}


def test_the_peak_is_near_what_the_compiler_assigns(rng):
    width, layers = int(rng.integers(200, 400)), int(rng.integers(4, 8))

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((4096, width), jnp.float32)
    compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    held = sum(live_at_peak(Module.of(compiled.as_text())).values())
    assert held == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.1)
