"""A run that starts from a part of another model, under other names, on another layout and in another dtype."""

import json
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reports import silent
from safetensors.numpy import save_file

from axon.axes import ArraySpec
from axon.checkpoint import Checkpoints, Reader, Store
from axon.checkpoint.huggingface.config import write_config
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import known
from axon.checkpoint.huggingface.weights import SINGLE
from axon.config import dump, load
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Routing
from axon.run import InitFrom
from axon.run.convert import convert
from axon.run.folder import RunFolder
from axon.run.initial_values import InitialValues
from axon.runtime import Runtime, flattened, nested
from axon.train.optimizers import EMA, AdamW, Constant, Group
from models.llama import Llama
from models.qwen3_next import Qwen3Next

ATTENTION = ("embedding/*", "*/attention/*")
SPLIT = Layout({"data": 2, "tensor": 2}, zero=3)


class Wrapper(nnx.Module):
    """A model that has a Llama as its part `encoder`."""

    def __init__(self, encoder):
        self.encoder = encoder


@dataclass(frozen=True)
class Wrapped:
    inner: Llama

    @property
    def vocab(self):
        return self.inner.vocab

    def build(self):
        return Wrapper(self.inner.build())


@pytest.fixture(scope="module")
def saved(trained, few):
    """The parameters that the trained run has, by path."""
    with few(1):
        runtime = Runtime(trained.train.model, Layout())
    reader = Reader(trained.folder / "checkpoints")
    return reader.restore_arrays("parameters", runtime.abstract(runtime.parameters))


def initial(train, init_from, model, layout=SPLIT):
    """What a run of `model` on `layout` starts with: path → array, and the runtime."""
    runtime = Runtime(model, layout, devices=jax.devices()[: 4 if layout.mesh else 1])
    source = InitialValues.of(replace(train, model=model, init_from=init_from), runtime, silent)
    return flattened(source.read(runtime, 7, silent)), runtime


def check(values, runtime, expected):
    for path, value in values.items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
        abstract = runtime.abstract(runtime.parameters[path])
        assert (value.shape, value.dtype) == (abstract.shape, abstract.dtype)
        assert value.sharding.is_equivalent_to(abstract.sharding, value.ndim)


@pytest.mark.full
@pytest.mark.draws(1)
def test_what_matches_is_taken_bit_for_bit_on_any_layout_and_the_rest_is_drawn_as_ever(trained, saved):
    wider = replace(trained.train.model, mlp=96)
    values, runtime = initial(trained.train, InitFrom(str(trained.folder), paths=ATTENTION), wider)
    drawn = flattened(runtime.initialise(7)[0])
    taken = [path for path in values if any(fnmatchcase(path, pattern) for pattern in ATTENTION)]
    assert len(taken) == 5
    check(values, runtime, drawn | {path: saved[path] for path in taken})
    assert not np.array_equal(drawn[taken[0]], saved[taken[0]])


def test_a_subtree_is_taken_under_another_name(trained, saved):
    wrapped = Wrapped(trained.train.model)
    values, runtime = initial(trained.train, InitFrom(str(trained.folder), rename=(("", "encoder"),)), wrapped)
    check(values, runtime, {f"encoder/{path}": value for path, value in saved.items()})


def test_arrays_of_another_dtype_are_cast_where_that_is_asked_for(trained, saved, copied):
    half = {path: jnp.asarray(value, jnp.bfloat16) for path, value in saved.items()}
    with Store(copied / "checkpoints", Checkpoints()) as store:
        store.save(99, {"parameters": nested(half)}, {"tokens": 0})
    model = trained.train.model
    with pytest.raises(UserError, match=r"head: dtype bfloat16, the model's is float32") as refused:
        initial(trained.train, str(copied), model)
    assert "InitFrom.cast allows another dtype" in str(refused.value)
    check(*initial(trained.train, InitFrom(str(copied), cast=True), model), half)


def test_a_model_of_the_hub_is_taken_under_another_name_too(trained, saved, few, tmp_path):
    with few(1):
        convert(str(trained.folder), f"hf:{tmp_path / 'model'}", silent)
    wrapped = Wrapped(trained.train.model)
    renamed = InitFrom(f"hf:{tmp_path / 'model'}", rename=(("", "encoder"),))
    values, runtime = initial(trained.train, renamed, wrapped)
    check(values, runtime, {f"encoder/{path}": value for path, value in saved.items()})
    with pytest.raises(UserError, match=r"layers/block/mlp/up: shape \(1, 32, 64\), the model's is \(1, 32, 96\)"):
        initial(trained.train, f"hf:{tmp_path / 'model'}", replace(trained.train.model, mlp=96))


def test_a_block_that_predicts_a_token_further_is_taken_from_files_that_have_it(trained, tmp_path, rng):
    block = Qwen3Next(
        40, 8, 2, 2, kv_heads=1, mlp=4, head_dim=4, shared=4, routing=Routing(2, 1),
        delta_heads=1, per_head=2, key_dim=4, value_dim=4, full_every=2, multi_token=True,
    )  # fmt: skip
    plain, table, source = replace(block, multi_token=False), known()["Qwen3NextForCausalLM"], f"hf:{tmp_path}"
    (tmp_path / "config.json").write_text(json.dumps(write_config(table, block) | {"eos_token_id": 0}))
    shutil.copy(RunFolder.existing(trained.folder).tokenizer, tmp_path / "tokenizer.json")

    def written(model):
        shapes = pieces_of(table, model.build(), model.vocab).shapes
        arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        save_file(arrays, tmp_path / SINGLE)
        return arrays

    arrays = written(block)
    values, _ = initial(trained.train, source, block, Layout())
    np.testing.assert_array_equal(values["mtp/from_hidden"], arrays["mtp.fc.weight"][:, 8:].T)
    assert values.keys() - initial(trained.train, source, plain, Layout())[0].keys() == {
        path for path in values if path.startswith("mtp/")
    }
    written(plain)
    with pytest.raises(UserError, match=r"mtp/from_hidden: missing"):
        initial(trained.train, source, block, Layout())


@pytest.mark.full
def test_what_is_taken_can_be_frozen_by_the_optimizers_groups(trained, saved, do, tmp_path):
    frozen = AdamW(Constant(1e-2), groups=(Group("embedding/*", frozen=True), Group("*/attention/*", frozen=True)))
    wider = replace(trained.train, model=replace(trained.train.model, mlp=96), optimizer=frozen, sample=None)
    begun = do(replace(wider, init_from=InitFrom(str(trained.folder), paths=ATTENTION)), tmp_path / "run", steps=1)
    assert any("5 of 12; initial values for" in line for line in begun.lines)
    runtime = Runtime(wider.model, Layout(), devices=jax.devices()[:1])
    after = Reader(begun.folder / "checkpoints").restore_arrays("parameters", runtime.abstract(runtime.parameters))
    drawn = flattened(runtime.initialise(wider.seed)[0])
    for path, value in after.items():
        taken = any(fnmatchcase(path, pattern) for pattern in ATTENTION)
        assert np.array_equal(value, saved[path] if taken else drawn[path]) == taken, path


@pytest.mark.full
def test_of_a_run_that_averages_its_average_is_taken(trained, do, tmp_path):
    averaging = EMA(trained.train.optimizer, decay=0.99)
    run = do(replace(trained.train, optimizer=averaging, sample=None), tmp_path / "run")
    reader, step = Reader(run.folder / "checkpoints"), run.train.steps
    values, _ = initial(trained.train, InitFrom(str(run.folder), paths=ATTENTION), replace(trained.train.model, mlp=96))
    path = "embedding/table"
    average = reader.load_leaf(step, f"optimizer/average/{path}", jax.ShapeDtypeStruct((320, 32), jnp.float32))
    np.testing.assert_array_equal(values[path], average)


OFFERED = {path: jax.ShapeDtypeStruct((4, 8), jnp.float32) for path in ("enc/a/query", "enc/a/key", "enc/out", "head")}
MODEL = {path: ArraySpec(("embed", "mlp"), (4, 8)) for path in ("a/query", "a/key", "out", "head")}


def test_the_first_pair_of_names_that_fits_applies_to_whole_parts_of_a_path():
    names = InitFrom("run", rename=(("enc/a", "attention"), ("enc", ""), ("he", "no")))
    assert [names.renamed(path) for path in OFFERED] == ["attention/query", "attention/key", "out", "head"]


def test_all_that_differs_is_listed_with_what_was_probably_meant():
    given = OFFERED | {"enc/outt": OFFERED["enc/out"], "enc/a/key": jax.ShapeDtypeStruct((4, 9), jnp.float32)}
    del given["enc/out"]
    with pytest.raises(UserError) as refused:
        InitFrom("run", rename=(("enc", ""),)).taken(given, MODEL, False)
    assert str(refused.value).splitlines()[1:] == [
        "  out: missing. Did you mean 'outt'?",
        "  outt: not a parameter of the model. Did you mean 'out'?",
        "  a/key: shape (4, 9), the model's is (4, 8)",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"paths": ("a/quer",)}, r"InitFrom.paths = 'a/quer' matches none of .*Did you mean 'a/query'"),
        ({"rename": (("encc", ""),)}, r"InitFrom.rename has 'encc', with which .*Did you mean 'enc'"),
        ({"rename": (("enc/a", ""), ("enc/out", "key"))}, "gives enc/a/key and enc/out of run one path: key"),
    ],
)
def test_mistakes_are_said(given, said):
    with pytest.raises(UserError, match=said):
        InitFrom("run", **given).taken(OFFERED, MODEL, False)


def test_mathematics_other_than_a_runs_weights_were_trained_with_is_refused_unless_it_is_meant(trained):
    model = trained.train.model
    other = replace(model, rope=replace(model.rope, theta=77.0))
    with pytest.raises(UserError) as caught:
        initial(trained.train, str(trained.folder), other)
    assert f"Llama.rope.theta is 77.0, and {model.rope.theta} in {trained.folder}" in str(caught.value)
    assert "InitFrom.changed = ('rope.theta',)" in str(caught.value)
    initial(trained.train, InitFrom(str(trained.folder), changed=("rope.theta",)), other)
    initial(trained.train, str(trained.folder), replace(model, vocab_multiple=2 * model.vocab_multiple))


def test_a_config_names_it_and_a_string_is_short_for_it(tiny, tmp_path):
    given = InitFrom("runs/one", paths=ATTENTION, rename=(("encoder", ""),))
    for one in (given, "runs/one"):
        (tmp_path / "run.gin").write_text(dump(replace(tiny, init_from=one)))
        assert load(tmp_path / "run.gin").tree.init_from == one
