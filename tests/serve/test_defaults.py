"""What a model's generation_config.json says of requests that do not say it."""

import json

import pytest

from axon.errors import UserError
from axon.run.served_model import sampling_defaults


def test_defaults_are_what_the_file_says_of_draws(tmp_path):
    assert sampling_defaults(None) == sampling_defaults(tmp_path) == {}
    said = {"temperature": 0.6, "top_k": 20, "min_p": None, "do_sample": True, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_k", 1.5), ("top_p", 0), ("min_p", "0"), ("repetition_penalty", 0)]
)
def test_a_default_that_nothing_can_be_drawn_by_is_refused(tmp_path, name, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(UserError, match=f"generation_config.json: {name} is .*; must be a"):
        sampling_defaults(tmp_path)
