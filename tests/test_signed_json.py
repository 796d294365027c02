"""A signed text comes back only as it was."""

import json

import pytest

from axon.signed_json import signed, unsigned

VALUE = {"a": [1, "b", None], "c": {"d": 0.5, "é": ', "crc32": "'}}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_value_comes_back_and_its_text_is_json(indent):
    text = signed(VALUE, indent)
    assert unsigned(text) == VALUE
    assert VALUE.items() <= json.loads(text).items()


def test_every_flipped_bit_is_noticed():
    text = signed(VALUE)
    for place in range(len(text)):
        for bit in range(7):
            flipped = text[:place] + chr(ord(text[place]) ^ 1 << bit) + text[place + 1 :]
            with pytest.raises(ValueError, match="its own checksum does not match"):
                unsigned(flipped)


@pytest.mark.parametrize("harm", [lambda text: "", lambda text: "{}", lambda text: text[:-1], lambda text: text + "\n"])
def test_what_is_shorter_or_longer_is_noticed(harm):
    with pytest.raises(ValueError, match="its own checksum does not match"):
        unsigned(harm(signed(VALUE)))
