"""Attention compiled for an H200 that is not here: which masks are cuDNN's there, and how little memory it takes.

XLA's compiler does not ask cuDNN: that it has a kernel, and right numbers, is seen on a GPU by
`scripts/accelerator_check`.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon import axes
from axon.kernels.attention import (
    NAME,
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Prefix,
    SameDocument,
    Window,
    attention,
    attention_and_lse,
)
from axon.layout import Execution, Layout, Placement
from axon.plan.flops import count_jaxpr
from axon.plan.topology import devices
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

BATCH, SEQ, HEADS, KV_HEADS, WIDTH = 2, 2048, 16, 4, 128
DENSE = 4 * BATCH * HEADS * SEQ**2 / 2**20
"""MiB of all scores in float32."""

PLAIN = FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
BIASED = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"
BY_NAME = {"attention": "cudnn"}
"""Else masks that are a bias are our own kernel's."""


@pytest.fixture(scope="module")
def placement():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    return Placement.of(Layout(), devices("h200:1"))


@pytest.fixture
def traced(placement):
    """traced(mask, …): forward and backward, and what was chosen; cuDNN's unless `kernels` are given."""

    def of(mask, dtype=jnp.bfloat16, policy=None, soft_cap=None, kernels=BY_NAME):
        def step(q, k, v, documents):
            def loss(q, k, v):
                out = attention(q, k, v, mask, documents=(documents, documents), soft_cap=soft_cap)
                return jnp.sum(out.astype(jnp.float32) ** 2)

            loss = loss if policy is None else jax.checkpoint(loss, policy=policy)
            return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

        whole = NamedSharding(placement.mesh, PartitionSpec())
        shapes = [(BATCH, SEQ, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape in shapes]
        operands.append(jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32, sharding=whole))
        local = jax.shard_map(
            step, mesh=placement.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        with axes.activate(axes.Scope(placement, jnp.bfloat16, execution=Execution(kernels=kernels))) as scope:
            return jax.jit(local).trace(*operands), scope.choices["attention"]

    return of


def compiled(traced):
    """cuDNN's calls, and MiB of temporaries."""
    made = traced.lower(lowering_platforms=("cuda",)).compile()
    calls = re.findall(r'custom_call_target="(__cudnn\$\w+)"', made.as_text())
    return calls, made.memory_analysis().temp_size_in_bytes / 2**20


@pytest.mark.few(mask=(Everything(), Causal() & Window(300), Prefix(100) & SameDocument()))
@pytest.mark.parametrize(
    ("mask", "calls"),
    [
        (Everything(), PLAIN),
        (Causal(), PLAIN),
        (Causal() & Window(300), PLAIN),
        (Causal() & SameDocument(), BIASED),
        (Causal() & SameDocument() & Window(300), BIASED),
        (Prefix(100) & SameDocument(), BIASED),
    ],
    ids=str,
)
def test_on_an_h200_attention_is_cudnns_in_a_fraction_of_the_memory(mask, calls, traced):
    step, chosen = traced(mask)
    assert chosen == f"cudnn, {mask} (requested by name)"
    found, temporaries = compiled(step)
    assert set(found) == set(calls)
    assert temporaries < DENSE / 10


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ({"dtype": jnp.float32}, "not cudnn: it computes in bfloat16 or float16, not float32"),
        ({"soft_cap": 30.0}, "not cudnn: it has no soft cap"),
    ],
)
def test_what_does_not_fit_is_xlas_and_says_why(problem, said, traced):
    step, chosen = traced(Causal(), kernels={}, **problem)
    assert chosen.startswith("xla, causal")
    assert said in chosen
    assert "dot_product_attention" not in str(step.jaxpr)


def test_the_forward_runs_again_in_the_backward_unless_a_remat_policy_keeps_what_it_names(traced):
    policies = jax.checkpoint_policies
    calls, _ = compiled(traced(Causal(), policy=policies.nothing_saveable)[0])
    assert sorted(calls) == [FORWARD, FORWARD, BACKWARD]
    calls, _ = compiled(traced(Causal(), policy=policies.save_only_these_names(NAME))[0])
    assert sorted(calls) == [FORWARD, BACKWARD]


def test_its_flops_are_those_of_the_pairs_that_its_mask_allows(traced):
    step, _ = traced(Causal() & SameDocument())
    pairs = SEQ * (SEQ + 1) // 2
    assert count_jaxpr(step.jaxpr.jaxpr).flops == 2 * BATCH * HEADS * pairs * WIDTH * (2 + 5)


def test_a_log_sum_exp_that_is_differentiated_takes_xlas_backward(placement):
    def loss(q):
        out, lse = attention_and_lse(q, q, q, AttentionConfig(Causal(), 0.1), AttentionInputs())
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    with axes.activate(axes.Scope(placement)) as scope:
        jax.make_jaxpr(jax.grad(loss))(jnp.zeros((1, 128, 2, 64), jnp.bfloat16))
    assert scope.choices["attention gradient"].endswith("(not cudnn: the log-sum-exp is differentiated too)")


@pytest.mark.full
def test_a_llama_s_step_on_h200s_calls_cudnn_in_each_layer():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    model = Llama(vocab=512, embed=512, layers=2, heads=4, kv_heads=2, mlp=512)
    seq = 640
    layout = Layout(mesh={"data": 4, "tensor": 2}, zero=3)
    options = {"execution": Execution(remat="full", kernels=BY_NAME), "devices": devices("h200:8")}
    program = Program(model, layout, AdamW(Constant(1e-3)), batch=8, seq=seq, **options)
    text = program.lower().compile().as_text()
    assert program.choices["attention"] == "cudnn, causal & same document (requested by name)"
    assert set(re.findall(r"__cudnn\$\w+", text)) == set(BIASED)
    assert f"{seq},{seq}]" in text  # of which pairs are of one document, for all heads
    assert not re.search(rf"f32\[[\d,]*{seq},{seq}\]", text)
