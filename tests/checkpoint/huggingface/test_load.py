"""Weights in files, into shards: what is read, how much at once, and what is said of weights that do not fit."""

import json
import math
import tracemalloc
from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.checkpoint.compare import CheckpointError
from axon.checkpoint.huggingface.load import CHUNK, THREADS, assign, check_weights, load, read_shard
from axon.checkpoint.huggingface.model import HubArray
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.save import Entry, Theirs, fetch_from, write_weights
from axon.checkpoint.huggingface.tables import known, table_for
from axon.checkpoint.huggingface.weights import Weights
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Routing, parameters
from axon.runtime import Runtime
from axon.runtime.stored import BLOCK
from models.deepseek import DeepSeek
from models.llama import Llama

LLAMA = Llama(vocab=40, embed=32, layers=3, heads=4, kv_heads=2, mlp=48)
DEEPSEEK = DeepSeek(
    vocab=40, embed=16, layers=3, first_dense=1, heads=2, mlp=24, expert_mlp=8, routing=Routing(4, 2, normalise=False),
    shared=8, q_latent=None, kv_latent=12, nope_dim=6, rope_dim=4, value_dim=10,
)  # fmt: skip
"""Arrays of theirs that have several of ours, one after the other within each head; and experts one by one."""


class Counted:
    """Random arrays of the right shapes; what is read of them."""

    def __init__(self, pieces, rng):
        self.shapes, self.reads = pieces.shapes, []
        self._arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in self.shapes.items()}

    def read(self, name, where):
        part = self._arrays[name][where]
        self.reads.append(part.nbytes)
        return part

    def item_size(self, name):
        return 4


class Unstored(Counted):
    """Arrays that are not in memory: an index of a model that would not fit there."""

    def __init__(self, pieces):
        self.shapes, self.reads = pieces.shapes, []

    def read(self, name, where):
        shape = tuple(len(range(*one.indices(size))) for one, size in zip(where, self.shapes[name], strict=True))
        self.reads.append(4 * int(np.prod(shape)))
        return np.ones(shape, np.float32)


def whole(source, pieces, path, shape):
    return read_shard(source, pieces, path, tuple((0, size) for size in shape), np.float32)


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_any_part_is_read_as_of_the_whole_by_chunks_of_any_size(config, rng):
    module = config.build()
    pieces = pieces_of(table_for(config), module, config.vocab)
    source = Counted(pieces, rng)
    for path, spec in parameters(module).items():
        full = whole(source, pieces, path, spec.shape)
        for chunk in (1, 300, 2**20):
            low = [int(rng.integers(size)) for size in spec.shape]
            ranges = tuple((a, int(rng.integers(a + 1, size + 1))) for a, size in zip(low, spec.shape, strict=True))
            part = read_shard(source, pieces, path, ranges, np.float32, chunk)
            np.testing.assert_array_equal(part, full[tuple(slice(*one) for one in ranges)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_every_bit_pattern_is_converted_as_numpy_does(dtype):
    bits = np.arange(2**16, dtype=np.uint16).view(dtype) if dtype != np.float32 else np.float32([0.1, np.nan, -np.inf])
    value = np.broadcast_to(bits, (40, *bits.shape)).T
    target = np.zeros(value.shape, np.float32)
    assign(target, value)
    np.testing.assert_array_equal(target, value.astype(np.float32))


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float32])
def test_what_is_transposed_is_assigned_block_by_block_whatever_its_order_and_size(stored, rng):
    for dims in range(4):
        shape = tuple(rng.integers(0 if dims == 1 else 1, (600, 600, 600, 60)[dims], dims))
        value = rng.normal(size=shape).astype(stored).transpose(rng.permutation(dims))
        target = np.zeros((2, *value.shape, 3), np.float32)[1, ..., 1]
        assign(target, value)
        np.testing.assert_array_equal(target, value.astype(np.float32))


LAYOUTS = {
    "zero": Layout(mesh={"data": 2, "tensor": 2}, zero=3),
    "pipeline": Layout(mesh={"pipe": 2}, pad_layers=True),
}


@pytest.mark.few(layout=("pipeline",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_on_any_layout_have_the_same_values_and_padding_is_zero(layout, rng):
    config = replace(LLAMA, vocab=37, vocab_multiple=4)
    count = int(np.prod(list(LAYOUTS[layout].mesh.values())))
    runtime = Runtime(config, LAYOUTS[layout], devices=jax.devices()[:count])
    pieces = pieces_of(table_for(config), runtime.module, config.vocab)
    source = Counted(pieces, rng)
    found = load(source, pieces, runtime.abstract(runtime.parameters))
    plain = config.build()
    logical = pieces_of(table_for(config), plain, config.vocab)
    for path, spec in parameters(plain).items():
        value, expected = np.asarray(found[path]), whole(source, logical, path, spec.shape)
        assert found[path].sharding == runtime.abstract(runtime.parameters)[path].sharding
        np.testing.assert_array_equal(value[: spec.shape[0]], expected)
        assert not np.any(value[spec.shape[0] :])
    assert not np.any(np.asarray(found["embedding/table"])[37:])
    theirs = Theirs(pieces, fetch_from(found))
    for name in pieces.shapes:
        np.testing.assert_array_equal(theirs(name), source.read(name, (...,)))


def test_host_memory_is_one_shard_and_a_chunk_in_each_thread_whatever_the_model_has():
    """The index of a 405B Llama: of each array the first of 4,096 shards, which are a few MB of its hundreds of GB."""
    config = Llama(vocab=128_256, embed=16_384, layers=126, heads=128, kv_heads=8, mlp=53_248)
    module = config.build()
    pieces, chunk = pieces_of(table_for(config), module, config.vocab), 2**20
    source = Unstored(pieces)
    for path in ("embedding/table", "layers/block/attention/key"):
        spec = parameters(module)[path]
        split = {"embed": 64, "mlp": 8, "heads": 8, "kv_heads": 8, "vocab": 8, "layers": 8}
        ranges = tuple((0, -(-size // split.get(name, 1))) for name, size in zip(spec.axes, spec.shape, strict=True))
        source.reads.clear()
        tracemalloc.start()
        shard = read_shard(source, pieces, path, ranges, np.float32, chunk)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < shard.nbytes + 2 * THREADS * chunk, path
        assert max(source.reads) <= chunk
        assert sum(source.reads) == shard.nbytes, path
        assert np.all(shard == 1)


def test_a_conversion_holds_a_few_blocks_of_an_array_however_large_it_is():
    """Arrays of a 405B Llama's 126 layers, the largest of 439 GB: the first blocks of them, and where all are."""
    config = Llama(vocab=128_256, embed=16_384, layers=126, heads=128, kv_heads=8, mlp=53_248)
    module = config.build()
    pieces = pieces_of(table_for(config), module, config.vocab)
    source = Unstored(pieces)
    for path in ("embedding/table", "layers/block/attention/key", "layers/block/mlp/up", "layers/block/mlp/down"):
        array = HubArray.of(path, parameters(module)[path], source, pieces)
        assert math.prod(array.grid) * 4 <= BLOCK
        tracemalloc.start()
        for where, value in islice(array.blocks(), 2):
            assert value.shape == tuple(one.stop - one.start for one in where)
            assert np.all(value == 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 * BLOCK + 2 * THREADS * CHUNK, path


@pytest.mark.parametrize("block", [100, 700, 2**20])
def test_the_blocks_of_an_array_are_all_of_it_once(block, rng, monkeypatch):
    monkeypatch.setattr("axon.runtime.stored.BLOCK", block)
    module = LLAMA.build()
    pieces = pieces_of(table_for(LLAMA), module, LLAMA.vocab)
    source = Counted(pieces, rng)
    for path in ("embedding/table", "layers/block/attention/key", "norm/scale"):
        spec = parameters(module)[path]
        found = np.full(spec.shape, np.nan, np.float32)
        for where, value in HubArray.of(path, spec, source, pieces).blocks():
            assert np.all(np.isnan(found[where]))
            assert value.nbytes <= block
            found[where] = value
        np.testing.assert_array_equal(found, whole(source, pieces, path, spec.shape))


def test_a_shard_is_on_its_device_before_the_next_is_read(rng):
    runtime = Runtime(LLAMA, Layout(mesh={"data": 8}, zero=3), devices=jax.devices()[:8])
    pieces = pieces_of(table_for(LLAMA), runtime.module, LLAMA.vocab)
    source = Counted(pieces, rng)
    order = []

    def put(value, sharding):
        order.append(sum(source.reads))
        return jax.device_put(value, sharding)

    abstract = runtime.abstract(runtime.parameters)
    load(source, pieces, {"head": abstract["head"]}, put=put)
    size = LLAMA.vocab * LLAMA.embed * 4
    assert order == [size // 8 * (place + 1) for place in range(8)]


def entries(source, dtype):
    return [Entry(name, dtype, shape) for name, shape in source.shapes.items()]


@pytest.mark.parametrize(("dtype", "numpy"), [("F32", np.float32), ("BF16", jnp.bfloat16), ("F16", np.float16)])
@pytest.mark.parametrize("shard", [2**30, 9000])
def test_files_are_read_back_and_are_the_library_s_own(dtype, numpy, shard, rng, tmp_path):
    pieces = pieces_of(table_for(LLAMA), LLAMA.build(), LLAMA.vocab)
    source = Counted(pieces, rng)
    values = {name: source.read(name, (...,)).astype(numpy) for name in source.shapes}
    files = write_weights(tmp_path, entries(source, dtype), values.__getitem__, shard)
    assert (len(files) > 1) == (shard == 9000)
    weights = Weights(tmp_path)
    assert dict(weights.shapes) == dict(source.shapes)
    assert set(weights.dtypes.values()) == {dtype}
    for name, value in values.items():
        np.testing.assert_array_equal(weights.read(name, (slice(None),) * value.ndim), value)
    if len(files) == 1:
        from safetensors.numpy import save_file

        save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "theirs").read_bytes() == (tmp_path / files[0]).read_bytes()


def test_all_that_does_not_fit_is_listed_at_once(rng):
    pieces = pieces_of(table_for(LLAMA), LLAMA.build(), LLAMA.vocab)
    source = Counted(pieces, rng)
    shapes = dict(source.shapes)
    shapes["lm_heads.weight"] = shapes.pop("lm_head.weight")
    shapes["model.norm.weight"] = (33,)
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (4,)
    source.shapes = shapes
    with pytest.raises(CheckpointError) as caught:
        check_weights(source, pieces, table_for(LLAMA).unused, "hf:x", "Llama")
    assert str(caught.value).splitlines() == [
        "the weights in hf:x are not those of Llama:",
        "  lm_head.weight: missing. Did you mean 'lm_heads.weight'?",
        "  lm_heads.weight: not an array of the model. Did you mean 'lm_head.weight'?",
        "  model.norm.weight: shape (33,), the model's is (32,)",
    ]


def test_what_no_file_has_or_is_quantised_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(UserError, match=r"There is no file or folder .*gone\.safetensors"):
        dict(Weights(tmp_path).shapes)
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(4, np.uint8)}, tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match="x is stored as U8, which is quantised"):
        Weights(tmp_path).item_size("x")
    (tmp_path / "gone.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header.....")
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is damaged"):
        dict(Weights(tmp_path).shapes)


def test_every_table_is_found_by_its_name():
    assert {"LlamaForCausalLM", "GPT2LMHeadModel", "DeepseekV3ForCausalLM"} <= known().keys()
