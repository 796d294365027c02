"""A config.json in and out, and what our models cannot be."""

from dataclasses import replace

import pytest

from axon.checkpoint.huggingface.config import read_config, rewritten, unknown_fields, write_config
from axon.checkpoint.huggingface.tables import known, table_for, table_of
from axon.errors import UserError
from axon.nn import LinearScaling, Llama3Scaling, Rope, YarnScaling
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.llama import Llama

LLAMA = Llama(vocab=40, embed=32, layers=3, heads=4, kv_heads=2, mlp=48)
THEIRS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (LLAMA, "LlamaForCausalLM"),
        (replace(LLAMA, window=7), "MistralForCausalLM"),
        (replace(LLAMA, bias=True), "Qwen2ForCausalLM"),
        (replace(LLAMA, bias=True, window=7, full_layers=1), "Qwen2ForCausalLM"),
        (replace(LLAMA, window=7, full_layers=2, head_dim=6), "MistralForCausalLM"),
        (replace(LLAMA, bias=True, out_bias=True, mlp_bias=True, activation="gelu"), "LlamaForCausalLM"),
        (replace(LLAMA, qk_norm=True, head_dim=10), "Qwen3ForCausalLM"),
        (replace(LLAMA, rope=Rope(5e5, Llama3Scaling())), "LlamaForCausalLM"),
        (replace(LLAMA, rope=Rope(5e5, LinearScaling(4.0))), "LlamaForCausalLM"),
        (replace(LLAMA, rope=Rope(5e5, YarnScaling(4.0, 64, truncate=False))), "LlamaForCausalLM"),
        (GPT2(vocab=40, embed=32, layers=2, heads=4, mlp=100, positions=64), "GPT2LMHeadModel"),
        (
            Gemma(
                40, 32, 7, 4, 2, 48, 8, window=5, local_layers=2, qk_norm=True, rope=Rope(1e6), query_pre_attn_scalar=20
            ),
            "Gemma3ForCausalLM",
        ),
    ],
)
def test_a_model_goes_out_and_comes_in_as_it_was(model, name):
    config = write_config(table_for(model), model)
    assert config["architectures"] == [name]
    assert read_config(table_of(config), config) == model


def test_what_a_config_lacks_is_what_transformers_takes():
    assert read_config(table_of(THEIRS), THEIRS) == replace(LLAMA, kv_heads=4, norm_eps=1e-6)


def test_what_was_said_at_another_place_is_not_left_there():
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    before = THEIRS | {"rope_parameters": linear, "partial_rotary_factor": 1.0, "pad_token_id": 3, "mine": 1}
    after = rewritten(table_of(before), before, LLAMA)
    assert read_config(table_of(after), after) == LLAMA
    assert (after["pad_token_id"], after["mine"]) == (3, 1)


def test_fields_of_frequencies_that_nothing_reads_are_told():
    nested = {"full_attention": {"rope_type": "default", "mine": 1}, "yours": 2}
    config = THEIRS | {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}, "rope_parameters": nested}
    told = ["rope_scaling.finetuned", "rope_parameters.full_attention", "rope_parameters.yours"]
    assert unknown_fields(table_of(config), config) == told
    told = ["rope_scaling.finetuned", "rope_parameters.yours", "rope_parameters.full_attention.mine"]
    assert unknown_fields(known()["Gemma3ForCausalLM"], config) == told


@pytest.mark.parametrize("described", ["rope_scaling", "rope_parameters"])
def test_rotary_frequencies_of_old_and_new_files_are_the_same(described):
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = THEIRS | {"rope_theta": 500.0, described: rope | {"rope_type": "llama3"}}
    if described == "rope_parameters":
        config[described]["rope_theta"] = config.pop("rope_theta")
    assert read_config(table_of(config), config).rope == Rope(500.0, Llama3Scaling(8.0, 1.0, 4.0, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlammaForCausalLM"]}, "Did you mean 'LlamaForCausalLM'?"),
        (
            {"architectures": ["BloomForCausalLM"]},
            "Known: BertForMaskedLM, BertForSequenceClassification, BertModel, Deepseek",
        ),
        ({"hidden_act": "gelu_tanh"}, 'hidden_act is "gelu_tanh"; must be one of "silu", "swish", "gelu"'),
        ({"sliding_window": 8}, "sliding_window is 8; must be null; Llama as LlamaForCausalLM has no other"),
        ({"num_key_value_heads": 3}, "(heads is num_attention_heads, kv_heads is num_key_value_heads in config.json)"),
        ({"model_type": "mistral"}, "model_type is 'mistral'; transformers reads the weights by the latter"),
        ({"rope_scaling": {"rope_type": "llama4"}}, 'rope_scaling: rope_type is "llama4", which the architecture has'),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json: rope_scaling: there is no field 'factor'"),
        (
            {"rope_scaling": {"type": "linear", "factor": "8"}},
            'config.json: rope_scaling: factor is "8"; must be a numb',
        ),
        ({"rope_scaling": "linear"}, 'config.json: rope_scaling is "linear"; must be an object'),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            'the weights are "hqq"; Axon reads float32, bfloat16, float16, and bits',
        ),
        ({"hidden_size": None}, "hidden_size is null; must be an integer in [1, 2**31)"),
    ],
)
def test_what_the_model_cannot_be_is_refused(change, message):
    config = THEIRS | change
    with pytest.raises(UserError) as caught:
        read_config(table_of(config), config)
    assert message in str(caught.value)


def test_a_model_that_no_architecture_is_says_what_each_lacks():
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM: nope_every is 2, and would become None"):
        table_for(replace(LLAMA, bias=True, nope_every=2))
    assert known()["LlamaForCausalLM"].model is Llama
