"""How a run is carried out: what cannot be is refused by field, before anything is traced."""

import re

import pytest

from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.precision import Int8, LossScale, Precision
from axon.run import Serve
from axon.runtime import Runtime
from models.bert import Bert
from models.llama import Llama

SIZES = {"vocab": 32, "embed": 8, "layers": 1, "heads": 2, "mlp": 8}
LLAMA = Llama(**SIZES, kv_heads=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"remat": "ful"}, "remat: unknown remat policy 'ful'. Did you mean 'full'?"),
        ({"remat": {"gate": "ofload"}}, "remat: unknown remat policy 'ofload'. Did you mean 'offload'?"),
        ({"remat": {"full": "save", "local": "minimal"}}, "remat: 'local' is mapped to the unknown action 'minimal'."),
        ({"remat": {"input": "recompute"}}, "remat: a block's input cannot be recomputed"),
        ({"remat": {}}, "remat = {} names nothing"),
        ({"dispatcher": "paded"}, "dispatcher: unknown dispatcher 'paded'. Did you mean 'padded'?"),
        ({"capacity_factor": 0.5}, "capacity_factor is 0.5; must be at least 1"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan; must be at least 1"),
        ({"host": ("optimiser",)}, "host: 'optimiser' cannot be stored there. Did you mean 'optimizer'?"),
        ({"host": ("params", "params")}, "host = ('params', 'params') names a kind of array more than once"),
        ({"disk": {"params": "scratch"}}, "disk: 'params' cannot be stored there."),
        ({"host": ("optimizer",), "disk": {"optimizer": "scratch"}}, "'optimizer' is in both Execution.host"),
        ({"disk": {"optimizer": ""}}, "disk"),
    ],
)
def test_what_no_run_can_be_is_refused(fields, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        Execution(**fields)
    assert "Execution." in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"remat": {"gaet": "save"}}, "remat: no activation is named 'gaet'. Did you mean 'gate'?"),
        ({"remat": {"full": "minimal"}}, "remat: no kind of block or activation is named 'full'."),
        ({"kernels": {"atention": "xla"}}, "kernels: unknown operation 'atention'. Did you mean 'attention'?"),
        ({"dispatcher": "padded"}, "dispatcher is of experts, as in axon.nn.MoE, and a LanguageModel has no experts"),
        ({"compiler_options": {"xla_no_such_option": True}}, "compiler_options = {'xla_no_such_option': True}: the"),
    ],
)
def test_what_this_model_cannot_be_is_refused_before_anything_is_traced(fields, message):
    with pytest.raises(UserError, match=re.escape(f"Execution.{message}")):
        Runtime(LLAMA, Layout({"data": 1}), execution=Execution(**fields))


OF_TRAINING = [{"host": ("params",)}, {"disk": {"optimizer": "scratch"}}, {"remat": "full"}]


@pytest.mark.parametrize("fields", OF_TRAINING, ids=str)
def test_tiers_of_training_are_refused_in_serving(fields):
    with pytest.raises(UserError, match=rf"Execution\.{next(iter(fields))} = .* is of training alone"):
        Serve(LLAMA, execution=Execution(**fields))


@pytest.mark.parametrize(
    "fields", [{"recipe": Int8()}, {"reduce": "bfloat16"}, {"parameters": "bfloat16"}, {"loss_scale": LossScale()}]
)
def test_what_a_precision_says_of_training_is_refused_in_serving(fields):
    with pytest.raises(UserError, match=rf"Precision\.{next(iter(fields))} = .* of training alone"):
        Serve(LLAMA, precision=Precision(**fields))


def test_options_of_the_compiler_are_over_the_chips():
    options = {"xla_cpu_enable_fast_math": False}
    runtime = Runtime(LLAMA, Layout({"data": 1}), execution=Execution(compiler_options=options))
    assert runtime.compiler_options.items() >= options.items()


def test_a_model_without_depth_has_nothing_to_recompute():
    class Flat:
        def build(self):
            return Bert(**SIZES).build().embedding

    with pytest.raises(UserError, match=r"Execution.remat and Execution.unroll are of the layers .* has no Depth"):
        Runtime(Flat(), Layout({"data": 1}), execution=Execution(remat="full"))
