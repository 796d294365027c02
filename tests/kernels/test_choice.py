"""Which implementation runs: the first that fits, or the one asked for, or an error; and it is said."""

from importlib import import_module
from types import SimpleNamespace

import pytest

from axon import axes
from axon.errors import UserError
from axon.kernels.choice import OPERATIONS, check_names, choose, platform
from axon.layout import Layout
from axon.train.optimizer import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama


def scope(platform="cpu", **kernels):
    return axes.activate(axes.Scope(SimpleNamespace(platform=platform), kernels=kernels))


def test_the_first_that_fits_runs_and_the_reasons_of_those_before_it_are_said():
    with scope() as active:
        assert choose("attention", {"tpu": "too odd", "xla": None, "reference": None}, "causal") == "xla"
    assert active.notices == {"attention": "xla, causal (not tpu: too odd)"}


def test_one_that_is_asked_for_runs_even_if_another_comes_first():
    with scope(attention="reference") as active:
        assert choose("attention", {"xla": None, "reference": None}) == "reference"
        assert choose("sampling", {"xla": None, "reference": None}) == "xla"
    assert active.notices["attention"] == "reference (asked for by name)"


def test_one_that_is_asked_for_and_cannot_run_is_an_error_and_no_fallback():
    with scope(attention="tpu"), pytest.raises(UserError, match="'tpu' was asked for attention, and cannot do it: odd"):
        choose("attention", {"tpu": "odd", "xla": None})
    with scope(attention="xls"), pytest.raises(UserError, match=r"no implementation 'xls'\. Did you mean 'xla'"):
        choose("attention", {"tpu": "odd", "xla": None})


def test_where_nothing_fits_every_reason_is_told():
    with pytest.raises(UserError, match="attention: tpu: too odd; xla: too even"):
        choose("attention", {"tpu": "too odd", "xla": "too even"})


def test_the_platform_is_the_layout_s():
    assert platform() == "cpu"
    with scope("tpu"):
        assert platform() == "tpu"


def test_an_operation_that_does_not_exist_is_refused_before_anything_is_traced():
    check_names(dict.fromkeys(OPERATIONS, "xla"))
    model = Llama(vocab=32, embed=16, layers=1, heads=2, kv_heads=2, mlp=16)
    with pytest.raises(UserError, match=r"no operation is called 'atention'\. Did you mean 'attention'"):
        Program(model, Layout(), AdamW(Constant(1e-3)), batch=8, seq=8, kernels={"atention": "xla"})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_folder_and_cases(operation):
    cases = import_module(f"axon.kernels.{operation}.cases").cases()
    assert cases
    assert {case.operation for case in cases} == {operation}
