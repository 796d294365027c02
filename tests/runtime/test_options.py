"""XLA's options: which devices get which, and that their compilers know them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon.layout import Layout, Placement
from axon.plan.topology import devices
from axon.runtime.options import TABLE, compiler_options, options


def test_a_cpu_and_no_device_get_none():
    assert options(jax.devices("cpu")) == options([]) == ()


@pytest.mark.parametrize(
    ("target", "kind"),
    [("v5p:2x2x1", "TPU v5"), ("v5e:2x2", "TPU v5 lite"), ("v6e:2x2", "TPU v6 lite"), ("tpu7x:2x2x1", "")],
)
def test_a_chip_gets_its_row_of_the_table_and_its_compiler_takes_it(target, kind):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    placement = Placement.of(Layout({"data": -1}), devices(target))
    assert options(placement.devices) == tuple(TABLE.get(kind, ()))
    stored = NamedSharding(placement.mesh, PartitionSpec("data"))
    array = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=stored)
    jax.jit(jnp.sin).lower(array).compile(compiler_options=compiler_options(placement.devices))
