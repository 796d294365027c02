"""FLOPs that optimizers declare, beside those of the programs that they run."""

import jax.numpy as jnp
import pytest
from flax import nnx

from axon.nn import Param
from axon.nn.param import parameters
from axon.plan.flops import count_flops
from axon.train.optimizers import EMA, SOAP, AdamW, Constant, Group, Muon, update_flops
from axon.train.optimizers.newton_schulz import orthogonalize, orthogonalize_flops
from axon.train.optimizers.soap import FLOAT32

SIZES = {"embed": 48, "mlp": 160, "vocab": 96}


class Weights(nnx.Module):
    def __init__(self):
        self.up, self.table = Param("embed mlp", SIZES), Param("vocab embed", SIZES)
        self.norm = Param("embed", SIZES, decay=False)


PARAMETERS = parameters(Weights())
RATE = Constant(1e-3)


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (48, 160)])
def test_flops_of_orthogonalisation_are_those_of_its_program(rows, columns):
    x = jnp.zeros((1, rows, columns), jnp.bfloat16)
    assert orthogonalize_flops(columns, rows, 5) == count_flops(lambda x: orthogonalize(x, 5), x).flops


def test_muon_multiplies_matrices_alone_and_an_average_nothing_besides():
    muon = Muon(RATE, AdamW(RATE))
    expected = {"up": orthogonalize_flops(48, 160, muon.steps)}
    assert muon.update_flops(PARAMETERS) == expected == update_flops(EMA(muon), PARAMETERS)
    assert update_flops(Muon(RATE, AdamW(RATE), groups=(Group("up", frozen=True),)), PARAMETERS) == {}
    assert update_flops(AdamW(RATE), PARAMETERS) == {}


@pytest.mark.parametrize("largest", [100, 1000])
def test_flops_of_rotations_are_those_of_soaps_program(largest):
    soap = SOAP(RATE, every=10**9, largest=largest)
    update = soap.direction({"up": PARAMETERS["up"]})
    value = {"up": jnp.zeros((48, 160))}
    program = count_flops(update.update, value, update.init(value), value).flops
    assert soap.update_flops(PARAMETERS)["up"] == pytest.approx(FLOAT32 * program, rel=1e-3)
