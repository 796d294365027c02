"""The search for tiles takes the fastest, and writes down what differs from the defaults."""

import json

import jax
import pytest

from axon.errors import UserError
from axon.kernels.attention import tiles as table
from axon.kernels.attention.tiles import Tiles, tiles_for
from scripts.bench import tiles as bench


def test_the_fastest_of_all_sizes_is_found_forward_then_backward(rng):
    forward, backward = ((int(a), int(b)) for a, b in rng.choice(bench.SIZES, (2, 2)))
    asked = []

    def seconds(candidates, of_backward):
        asked.append(len(candidates))
        wanted, sizes = (backward, "backward_rows backward_keys") if of_backward else (forward, "rows keys")
        return [float(tuple(getattr(c, name) for name in sizes.split()) != wanted) for c in candidates]

    assert bench.search(Tiles(dq_vmem=7), seconds) == Tiles(*forward, *backward, dq_vmem=7)
    assert all(count >= len(bench.SIZES) ** 2 for count in asked)


def test_what_was_found_is_what_the_kernels_take_from_then_on(tmp_path, monkeypatch):
    for module in (bench, table):
        monkeypatch.setattr(module, "TABLE", tmp_path / "tiles.json")
    (tmp_path / "tiles.json").write_text('{"TPU v4": {"rows": 512}}')
    bench.write("TPU v9", Tiles(rows=256, dq_vmem=5))
    bench.write("TPU v4", Tiles(keys=128))
    assert json.loads(bench.TABLE.read_text()) == {"TPU v4": {"keys": 128}, "TPU v9": {"rows": 256, "dq_vmem": 5}}
    tiles_for.cache_clear()
    assert tiles_for("TPU v9") == Tiles(rows=256, dq_vmem=5)
    assert tiles_for("TPU v10") == Tiles()
    tiles_for.cache_clear()


def test_every_chip_of_the_table_that_is_shipped_has_tiles():
    assert all(Tiles(**fields) for fields in json.loads(table.TABLE.read_text()).values())


@pytest.mark.skipif(jax.default_backend() == "tpu", reason="there it would search")
def test_a_search_without_a_tpu_says_so():
    with pytest.raises(UserError, match="runs the kernels on a TPU, and this machine's devices are cpus"):
        bench.search_here()
