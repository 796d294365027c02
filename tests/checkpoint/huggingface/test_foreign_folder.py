"""Files in a model's folder that hold JSON of another shape: each is refused by its path and field."""

import json

import numpy as np
import pytest

from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.model import open_model
from axon.checkpoint.huggingface.save import Entry, write_weights
from axon.checkpoint.huggingface.tables import table_for
from axon.errors import UserError
from models.llama import Llama

LLAMA = Llama(vocab=7, embed=8, layers=1, heads=2, kv_heads=2, mlp=8)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    write_weights(tmp_path, [Entry("a", "F32", (1,))], {"a": np.ones(1, np.float32)}.__getitem__)
    (tmp_path / "config.json").write_text(json.dumps(write_config(table_for(LLAMA), LLAMA)))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": "2"}, 'num_hidden_layers is "2"'),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"rope_scaling": [3]}, "rope_scaling is"),
        ({"quantization_config": 3}, "quantization_config is 3"),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps is "x"'),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes"'),
        ({"architectures": [5]}, "architectures is [5]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"max_position_embeddings": "x"}, 'max_position_embeddings is "x"'),
        ({"eos_token_id": "2"}, 'eos_token_id is "2"'),
    ],
)
def test_a_field_of_config_json_is_refused_by_its_folder_its_name_and_its_value(folder, change, named):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        open_model(f"hf:{folder}")
    assert str(caught.value).startswith(f"{path}: {named}")


@pytest.mark.parametrize(
    "content", [[], 3, {}, {"weight_map": 3}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../a"}}]
)
def test_an_index_of_weights_is_refused_by_its_path(folder, content):
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        open_model(f"hf:{folder}")
    assert str(caught.value).startswith(str(folder / INDEX))


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_file_that_is_a_list_or_nested_without_end_is_refused_by_its_path(folder, file):
    for text in ("[1]", "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "", '"x"'):
        (folder / file).write_text(text)
        with pytest.raises(UserError) as caught:
            open_model(f"hf:{folder}")
        assert str(caught.value).startswith(str(folder / file))


def test_the_folder_itself_is_taken(folder):
    assert open_model(f"hf:{folder}").model == LLAMA
