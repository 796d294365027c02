"""What a layout does to each parameter, counted as devices hold it."""

from dataclasses import replace

import jax
import numpy as np

from axon.layout import ArraySpec, explain

PARAMETERS = {
    "table": ArraySpec(("vocab", "embed"), (64, 32)),
    "query": ArraySpec(("layers", "embed", "heads", "head_dim"), (2, 32, 4, 8)),
    "norm": ArraySpec(("head_dim",), (8,)),
}


def test_the_bytes_of_a_row_are_those_that_a_device_holds(placed):
    placement = placed({"replica": 2, "data": 2, "tensor": 2}, zero=3)
    rows = {row.path: row for row in explain(placement, PARAMETERS)}
    assert list(rows) == list(PARAMETERS)
    for path, spec in PARAMETERS.items():
        x = jax.device_put(np.zeros(spec.shape, np.float32), placement.sharding(spec.axes, "params"))
        assert rows[path].bytes_per_device == x.addressable_shards[0].data.nbytes
    assert rows["table"].split == (("tensor",), ("data",))
    assert [path for path, row in rows.items() if row.replicated] == ["norm"]


def test_another_kind_has_its_own_rows_and_another_dtype_its_own_bytes(placed):
    placement = placed({"data": 4}, zero=1)
    (parameter, *_), (state, *_) = (list(explain(placement, PARAMETERS, kind)) for kind in ("params", "optimizer"))
    assert parameter.replicated
    assert not state.replicated
    halves = {path: replace(spec, dtype=np.float16) for path, spec in PARAMETERS.items()}
    assert next(explain(placement, halves)).bytes_per_device * 2 == parameter.bytes_per_device
