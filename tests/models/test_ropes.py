"""Rotary frequencies of each architecture, by every way in which a config.json can say them, beside `transformers`."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ropes

from axon.checkpoint.huggingface.config import read_config, unrepresented
from axon.checkpoint.huggingface.tables import table_of
from axon.errors import UserError

STRICTER = (
    r"rope_theta is true",
    r"rope_scaling is \[",
    r"Rope.fraction 0.4 of head_dim 8 is 3 elements",
    r"rope_parameters: original_max_position_embeddings is (null|\"4\")",  # Phi-3's are at the top level
    r"mscale_all_dim must go with rope_type yarn",
    r"head_dim is null; must be an integer",  # DeepSeek-V3 then takes embed / heads for its rotated width
)
"""What is refused here alone: `transformers` takes true for 1, an empty list for nothing, …"""
computed = cache(ropes.load)


def ours(config):
    """What the model of a config.json rotates by, and multiplies scores by: `ropes.Computed`."""
    return of_model(read_config(table_of(config), config), config["model_type"] in ropes.TWO)


@cache
def of_model(model, two):
    kinds = {"local": "sliding_attention", "full": "full_attention"} if two else {}
    found = {}
    for kind, block in model.build().layers.blocks.items():
        if block.attention.ropes:
            found.setdefault(kinds.get(kind, ""), []).append(block.attention)
    for same in found.values():
        assert len({(one.ropes, one.config.scale) for one in same}) == 1
    waves = [waves_of(*found[kind][0].ropes[0], length) for kind in sorted(found) for length in ropes.LENGTHS]
    return ropes.Computed(np.concatenate(waves), found[min(found)][0].config.scale)


@cache
def waves_of(rope, width, length):
    with jax.disable_jit():
        angles = rope.angles(jnp.arange(length)[None], width)
    return ropes.sketch(np.asarray(angles.cos[0]), np.asarray(angles.sin[0]))


def check(family, name, config):
    theirs = computed()[family][name]
    try:
        found, why = ours(config), ""
    except UserError as error:
        found, why = None, str(error)
    if theirs is None or any(re.search(one, why) for one in STRICTER):
        assert found is None, f"{name}: transformers refuses it"
        return
    assert found is not None, f"{name}: {why}"
    np.testing.assert_allclose(found.waves, theirs.waves, rtol=0, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(found.scale, theirs.scale, rtol=1e-6, err_msg=name)
    assert not unrepresented(table_of(config), read_config(table_of(config), config)), name


@pytest.mark.draws(4)
@pytest.mark.few(family=("llama", "phi3", "gemma3_text", "deepseek_v3"))
@pytest.mark.parametrize("family", ropes.FAMILIES)
def test_what_config_json_says_of_frequencies_is_what_transformers_computes_and_what_it_refuses_is_refused(family):
    for name, config in ropes.cases(family):
        if ropes.is_of(24, family, name):
            check(family, name, config)


@pytest.mark.full
@pytest.mark.parametrize("family", ropes.FAMILIES)
def test_every_way_to_say_frequencies_is_that_of_transformers(family):
    for name, config in ropes.cases(family):
        check(family, name, config)
    assert len(computed()[family]) == len([*ropes.cases(family)])
