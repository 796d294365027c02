"""The modules in a name stack."""

import jax
import jax.numpy as jnp
import pytest

from axon.parallel.pipeline.execute import BACKWARD_TICK
from axon.plan.scopes import module_path, scopes


@pytest.mark.parametrize(
    ("stack", "names"),
    [
        ("jvp(attention)/norm", ("attention", "norm")),
        ("/transpose(jvp(norm))/jvp(norm)", ("norm",)),
        ("jit(_train)/transpose(jvp(moe))/experts/shard_map/while/body/jit(silu)", ("moe", "experts")),
        ("checkpoint/rematted_computation/vmap(mlp)/cond/branch_1_fun", ("mlp",)),
        ("jit(_train)/jvp()/closed_call", ()),
        (f"jit(_train)/{BACKWARD_TICK}/attention", ("attention",)),
    ],
)
def test_of_a_name_stack_the_scopes_that_a_program_names_are_left(stack, names):
    assert scopes(stack) == names


def test_every_product_of_a_compiled_program_has_the_scopes_it_was_traced_in(rng):
    @jax.checkpoint
    def layer(x, w):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.tanh(x @ w), None

    def loss(x, ws):
        return jax.lax.scan(layer, x, ws)[0].sum()

    x, ws = rng.normal(size=(4, 4)), rng.normal(size=(3, 4, 4))
    text = jax.jit(jax.grad(loss, argnums=1)).lower(x, ws).compile().as_text()
    names = [line.split('op_name="')[1].split('"')[0] for line in text.splitlines() if "dot(" in line]
    assert len(names) >= 3
    assert {module_path(name) for name in names} == {"outer/inner"}
