"""LoRA of each family: it begins as the model, takes every matrix of the layers, and alone has gradients."""

import re

import jax
import numpy as np
import pytest
from test_transformers import FAMILIES, Family, evaluate

from axon.nn import parameters
from axon.nn.lora import LoRA
from axon.nn.weight_transform import transform_weights
from axon.runtime import nested

LAYER = re.compile(r"\.(layers?|h|block)\.\d+\.")
LEFT_OUT = re.compile(
    r"gate\.weight|router\.weight|shared_expert_gate|conv1d|relative_attention_bias|[._]bias$|sinks|norm|A_log"
)
"""What is no matrix of a product, or chooses experts."""


def matrices(pieces, module):
    """The paths of the matrices of layers, by the names that `transformers` has for them."""
    found = set()
    for path, spec in parameters(module).items():
        names = [one.name for one in pieces.of[path]]
        in_layers = all(LAYER.search(f".{name}") and not LEFT_OUT.search(name) for name in names)
        found |= {path} if in_layers and len(spec.own) > 1 else set()
    return found


def product(a, b, names):
    """Aᵀ·G, of arrays with these axes: a weight's first factor and gradient, and what is left."""
    letters = {name: chr(97 + at) for at, name in enumerate(dict.fromkeys(name for one in names for name in one))}
    left, right, out = ("".join(letters[name] for name in one) for one in names)
    return np.einsum(f"{left},{right}->{out}", np.float64(a), np.float64(b))


@pytest.mark.few(name=("gpt2",))
@pytest.mark.some(name=("t5", "vit", "qwen3_next", "deepseek_v2", "gpt_oss"))
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_a_family_begin_as_the_model_and_have_the_gradients_of_its_matrices(
    name, placed, compiled, bind, rng
):
    one, lora = Family(name), LoRA(rank=2)
    values, pieces = one.ours(plain := one.config.build())
    operands = transform_weights(adapted := one.config.build(), [lora])
    assert operands.keys() == matrices(pieces, plain)
    specs = parameters(adapted)
    trained = {path for path, spec in specs.items() if spec.trained}
    assert trained == {f"{path}/{factor}" for path in operands for factor in "ab"}
    start = {p: rng.normal(size=specs[p].shape).astype(np.float32) * (p[-1] == "a") for p in trained}
    frozen = {path: value for path, value in values.items() if path not in operands}
    frozen |= {f"{path}/base": values[path] for path in operands}

    def run(module, of, rest):
        return evaluate(name, bind(module, nested(rest | of)), one.reference.tokens)[0]

    def value_and_gradients(module, of, rest):
        return compiled(placed(), lambda of, rest: jax.value_and_grad(lambda of: run(module, of, rest))(of), of, rest)

    others = {path: value for path, value in values.items() if path not in operands}
    exact, of_matrix = value_and_gradients(plain, {path: values[path] for path in operands}, others)
    loss, found = value_and_gradients(adapted, start, frozen)
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    for path in operands:
        a, b = (specs[f"{path}/{factor}"].axes for factor in "ab")
        expected = lora.scale * product(start[f"{path}/a"], of_matrix[path], (a, parameters(plain)[path].axes, b))
        error = np.linalg.norm(found[f"{path}/b"] - expected)
        assert error <= 1e-4 * np.linalg.norm(expected) + 1e-7, path
        assert not np.any(found[f"{path}/a"]), path
