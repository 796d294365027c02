"""Which implementation runs: the first that fits, or the one asked for, or an error; and it is said."""

from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.axes import platform
from axon.errors import UserError
from axon.kernels.attention import Causal, Window, attention
from axon.kernels.choice import OPERATIONS, check_names, choose, with_gpu, with_tpu
from axon.kernels.grouped_matmul import grouped_matmul
from axon.kernels.quantized_matmul import TENSOR, quantize, quantized_matmul
from axon.kernels.sampling import sample
from axon.layout import Execution, Layout
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama


def scope(platform="cpu", **kernels):
    return axes.activate(
        axes.Scope(SimpleNamespace(platform=platform, chip=platform), execution=axes.Execution(kernels=kernels))
    )


def test_the_first_that_fits_runs_and_the_reasons_of_those_before_it_are_said():
    with scope() as active:
        assert choose("attention", {"tpu": "too odd", "xla": None, "reference": None}, "causal") == "xla"
    assert active.choices == {"attention": "xla, causal (not tpu: too odd)"}


def test_one_that_is_asked_for_runs_even_if_another_comes_first():
    with scope(attention="reference") as active:
        assert choose("attention", {"xla": None, "reference": None}) == "reference"
        assert choose("sampling", {"xla": None, "reference": None}) == "xla"
    assert active.choices["attention"] == "reference (requested by name)"


def test_one_that_is_asked_for_and_cannot_run_is_an_error_and_no_fallback():
    with scope(attention="tpu"), pytest.raises(UserError, match="'tpu' is unavailable for attention: odd"):
        choose("attention", {"tpu": "odd", "xla": None})
    with scope(attention="xls"), pytest.raises(UserError, match=r"no implementation 'xls'\. Did you mean 'xla'"):
        choose("attention", {"tpu": "odd", "xla": None})


def test_two_kinds_of_one_operation_are_both_said():
    x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    with scope() as active:
        for mask in (Causal(), Causal() & Window(4), Causal()):
            jax.eval_shape(lambda x, mask=mask: attention(x, x, x, mask), x)
    assert active.choices["attention"] == f"xla, {Causal()}; also xla, {Causal() & Window(4)}"


def test_where_nothing_fits_every_reason_is_told():
    with pytest.raises(UserError, match="attention: tpu: too odd; xla: too even"):
        choose("attention", {"tpu": "too odd", "xla": "too even"})


def test_the_platform_is_the_layout_s():
    assert platform() == "cpu"
    with scope("tpu"):
        assert platform() == "tpu"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("tpu", "xla (not tpu: odd)"),
        ("gpu", "xla (not tpu: this program is for a gpu)"),
        ("cpu", "xla"),
    ],
)
def test_the_kernel_for_tpus_is_always_known_and_passed_over_with_a_reason_except_on_a_cpu(where, said):
    with scope(where) as active:
        choose("attention", with_tpu("odd", {"xla": None, "reference": None}))
    assert active.choices["attention"] == said


@pytest.mark.parametrize(
    ("where", "unfit", "said"),
    [
        ("gpu", None, "cudnn"),
        ("gpu", "odd", "xla (not cudnn: odd)"),
        ("tpu", None, "xla"),
        ("cpu", None, "xla"),
    ],
)
def test_kernels_for_gpus_are_first_on_one_and_last_elsewhere(where, unfit, said):
    with scope(where) as active:
        choose("attention", with_gpu({"cudnn": unfit}, {"xla": None, "reference": None}))
    assert active.choices["attention"] == said
    if where != "gpu":
        refused = f"'cudnn' is unavailable for attention: this program is for a {where}"
        with scope(where, attention="cudnn"), pytest.raises(UserError, match=refused):
            choose("attention", with_gpu({"cudnn": unfit}, {"xla": None, "reference": None}))


def test_the_kernel_for_tpus_is_refused_elsewhere_for_the_platform_and_not_as_unknown(rng):
    logits, keys = rng.normal(size=(2, 8)).astype(np.float32), jax.random.split(jax.random.key(0), 2)
    quantized = jax.jit(lambda a: quantize(a, jnp.int8, TENSOR))
    x, w = (quantized(rng.normal(size=(8, 8)).astype(np.float32)) for _ in range(2))
    q = rng.normal(size=(1, 8, 2, 64)).astype(np.float32)
    calls = {
        "attention": lambda: attention(q, q, q, Causal()),
        "grouped_matmul": lambda: grouped_matmul(logits, logits.T[None], jnp.full(1, 2, jnp.int32)),
        "quantized_matmul": lambda: quantized_matmul(x, w),
        "sampling": lambda: sample(logits, keys, jnp.ones(2)),
    }
    for operation, call in calls.items():
        for where in ("cpu", "gpu"):
            refused = f"'tpu' is unavailable for {operation}: this program is for a {where}"
            with scope(where, **{operation: "tpu"}), pytest.raises(UserError, match=refused):
                call()


def test_an_operation_or_implementation_that_does_not_exist_is_refused_before_anything_is_traced():
    check_names(dict.fromkeys(OPERATIONS, "xla"))
    model = Llama(vocab=32, embed=16, layers=1, heads=2, kv_heads=2, mlp=16)
    for kernels, said in (
        ({"atention": "xla"}, r"unknown operation 'atention'\. Did you mean 'attention'"),
        ({"sampling": "xl"}, r"sampling has no implementation 'xl'\. Did you mean 'xla'"),
    ):
        with pytest.raises(UserError, match=said):
            Program(model, Layout(), AdamW(Constant(1e-3)), batch=8, seq=8, execution=Execution(kernels=kernels))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_folder_and_cases(operation):
    cases = import_module(f"scripts.bench.cases.{operation}").cases()
    assert cases
    assert {case.operation for case in cases} == {operation}
