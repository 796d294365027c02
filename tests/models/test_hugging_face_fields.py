"""Every table of a family's config.json: whatever a field holds is taken, or refused by name. No model is built."""

import pytest

from axon.checkpoint.huggingface.config import kinds_of, read_config
from axon.checkpoint.huggingface.tables import known, table_of
from axon.errors import UserError
from axon.foreign_json import ANY, one_of

TABLES = known()
VALUES = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**400, 2.0, -0.5, 0.5, 1e-300, 1e300),
    *(float("nan"), float("inf"), "", "2", "gelu", "\ud800", [], [1], [[1]], ["full_attention"] * 32, [None] * 1000),
    *({}, {"a": 1}, {"rope_type": 3}, {"rope_type": "linear"}, {"full_attention": 1}, {"quant_method": []}),
)
"""What a field may hold: of each type, at bounds and far beyond them."""


@pytest.mark.few(name=("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "T5ForConditionalGeneration"))
@pytest.mark.parametrize("name", TABLES)
def test_whatever_a_field_of_config_json_holds_is_taken_or_refused_by_its_name(name):
    table = TABLES[name]
    base = {"architectures": [name], "model_type": table.model_type, "num_experts_per_tok": 2}
    read = {field: kind for field, kind in kinds_of(table).items() if kind is not ANY}
    for field, kind in (read | {"quantization_config": one_of(None, {})}).items():
        for value in VALUES:
            config = base | {field: value}
            if kind.accepts(value):
                _taken_or_refused(config)
                continue
            with pytest.raises(UserError) as caught:
                read_config(table_of(config), config)
            assert field in str(caught.value)
            str(caught.value).encode()


def _taken_or_refused(config):
    try:
        read_config(table_of(config), config)
    except UserError as error:
        str(error).encode()
