"""docs/extend.md: its files, written out of the page, train as it says."""

import re
import runpy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reports import silent

from axon.config import load
from axon.layout import Execution, Layout, Placement
from axon.nn import Inputs
from axon.observe.metrics import read_metrics
from axon.run import program, run
from axon.run.engines import engine_of
from axon.run.export import export_model
from axon.run.inspect import generate_text
from axon.run.trained import open_trained
from axon.serve import Capacity, Request, Sampling, answers
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
ALONE = Layout({"data": 1}, rows={"taps": None})


def blocks() -> list[tuple[str, str]]:
    """(language, text) of each fenced block of the page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def named(text: str) -> str:
    """The file that a block is, as its first line says."""
    found = re.match(r"# (\w+\.(py|gin))\n", text)
    return found[1] if found else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory, with all files of the page."""
    folder = tmp_path_factory.mktemp("page")
    for _, text in blocks():
        if name := named(text):
            (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("AXON_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def train(folder):
    return runpy.run_path("train.py")["train"]


def losses(train, layout, batches):
    """Loss of each of the first steps on as many devices as `layout` has."""
    train = replace(train, layout=layout)
    made = program(train, Placement.of(layout, jax.devices()[: int(np.prod(list(layout.mesh.values())))]))
    state, found = made.init(), []
    for batch in batches:
        state, metrics = made.step(state, made.place(batch))
        found.append(float(metrics["loss"]))
    return found


def test_every_block_of_the_page_is_a_file_or_a_command():
    assert {language for language, text in blocks() if not named(text)} <= {"bash"}
    names = [named(text) for _, text in blocks() if named(text)]
    assert len(names) == len(set(names)) >= 7


def test_the_config_file_builds_the_tree_that_python_builds(train):
    assert load("mine.gin").tree == train


@pytest.mark.full
def test_a_run_of_the_config_file_is_that_of_one_device_in_python(folder, train):
    split = ["Layout.mesh = {'data': 4, 'tensor': 2}", "Layout.zero = 3"]
    lines = []
    run(load("mine.gin", split).tree, report=lines.append)
    logged = (folder / train.run_dir / "loss.csv").read_text().split()
    with train.data.prepare(str).train(train.seed) as batches:
        expected = losses(train, ALONE, [next(batches) for _ in range(train.steps)])
    steps, found = zip(*(map(float, line.split(",")) for line in logged), strict=True)
    assert steps == tuple(range(1, train.steps + 1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[-1] < expected[0]
    assert any(line.startswith("layers: 2 × local + full") for line in lines)


@pytest.mark.full
@pytest.mark.few(metric=("hardest",))
@pytest.mark.parametrize("metric", ["hardest", "reward_counts", "rollout_turns"])
def test_a_run_of_a_feed_that_sees_the_state_continues_bit_for_bit(metric, folder, train, tmp_path):
    mine = load("game.gin" if metric == "rollout_turns" else "rollouts.gin").tree
    if metric == "hardest":
        mine = replace(train, data=import_module("hardest").Hardest(train.data, tries=2))
    model, found = replace(train.model, layers=2), []
    mine = replace(mine, model=model, layout=ALONE, steps=4, evaluation=None, sample=None, trackers=())
    for stops in ((4,), (2, 4)):
        own = replace(mine, run_dir=str(tmp_path / str(len(stops))))
        for steps in stops:
            run(own, steps=steps, report=silent)
        found.append(
            [
                [one[name] for name in ("loss", "grad_norm", metric)]
                for one in read_metrics(own.folder / "metrics.jsonl")
            ]
        )
    assert found[0] == found[1]
    if metric == "hardest":
        assert [loss for loss, _, _ in found[0]] == pytest.approx([worst for _, _, worst in found[0]], rel=1e-3)


def test_tokens_that_come_one_by_one_are_mixed_as_they_are_at_once(train, bind, random_parameters, rng):
    model = replace(train.model, layers=2).build()
    values = jax.tree.map(jnp.asarray, random_parameters(model, rng))
    tokens, count = jnp.asarray(rng.integers(0, 300, (2, 6)), jnp.int32), 6
    positions = jnp.broadcast_to(jnp.arange(count), (2, count))

    @jax.jit
    def one_by_one():
        def step(cache, at):
            part = (lax.dynamic_slice_in_dim(x, at, 1, axis=1) for x in (tokens, positions))
            hidden, cache, _ = bind(model, values).hidden(Inputs(*part, start=at), cache)
            return cache, hidden[:, 0]

        return lax.scan(step, model.cache(2, count), jnp.arange(count))[1].swapaxes(0, 1)

    at_once = jax.jit(lambda: bind(model, values).hidden(Inputs(tokens, positions))[0])
    np.testing.assert_allclose(one_by_one(), at_once(), atol=1e-5)


@pytest.mark.full
def test_a_variable_follows_the_global_batch(folder, rng, packed_batch):
    model = runpy.run_path("running.py")["ScaledLlama"](vocab=32, embed=16, layers=2, heads=2, kv_heads=2, mlp=16)
    batch, found = packed_batch(rng, 4, 8, 32), []
    for layout in (Layout({"data": 1}), Layout({"data": 2, "tensor": 2}, zero=3)):
        devices = jax.devices()[: int(np.prod(list(layout.mesh.values())))]
        made = Program(model, layout, AdamW(Constant(1e-2)), batch=4, seq=8, devices=devices)
        state = made.init()
        for _ in range(2):
            state, metrics = made.step(state, made.place(batch))
        found.append(jax.device_get((metrics["loss"], metrics["squares"], state.variables)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), *found)
    seen = found[0][2]["layers"]["block"]["mean_square"]
    assert seen.shape == (2,)
    assert (seen != 1).all()


@pytest.mark.full
def test_an_objective_beside_a_frozen_model_is_the_same_on_every_layout(folder, rng, packed_batch):
    model = Llama(32, 16, 2, 2, kv_heads=2, mlp=16)
    options = {"objective": runpy.run_path("hints.py")["Hints"](), "references": {"teacher": replace(model, layers=1)}}
    batch, found = packed_batch(rng, 4, 8, 32), []
    stages = Layout({"pipe": 2}, microbatches=2, pad_layers=True)
    for layout in (Layout({"data": 1}), Layout({"data": 2, "tensor": 2}, zero=3), stages):
        devices = jax.devices()[: int(np.prod(list(layout.mesh.values())))]
        made = Program(model, layout, AdamW(Constant(1e-2)), batch=4, seq=8, devices=devices, **options)
        made.references.give("teacher", made.references.runtimes["teacher"].initialise(1)[0])
        state, steps = made.init(), []
        for _ in range(2):
            state, metrics = made.step(state, made.place(batch))
            steps.append((metrics["loss"], metrics["apart"]))
        found.append(jax.device_get(steps))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=2e-5)
    assert found[0][1][1] < found[0][0][1]


@pytest.mark.full
def test_a_transform_of_ones_own_trains_alike_on_every_layout_and_its_weights_not_at_all(folder, rng, packed_batch):
    transforms, model = (runpy.run_path("ia3.py")["IA3"](),), Llama(32, 16, 2, 2, kv_heads=2, mlp=16)
    batch, found = packed_batch(rng, 4, 8, 32), []
    for layout in (Layout({"data": 1}), Layout({"data": 2, "tensor": 2}, zero=3)):
        devices = jax.devices()[: int(np.prod(list(layout.mesh.values())))]
        optimizer = AdamW(Constant(1e-2))
        made = Program(model, layout, optimizer, batch=4, seq=8, devices=devices, transforms=transforms)
        state = made.init()
        before = jax.device_get(state.parameters["layers"]["block"])
        for _ in range(3):
            state, metrics = made.step(state, made.place(batch))
        after = jax.device_get(state.parameters["layers"]["block"])
        for part, name in (("attention", "key"), ("attention", "value"), ("mlp", "up")):
            np.testing.assert_array_equal(after[part][name]["base"], before[part][name]["base"])
            assert (before[part][name]["factor"] == 1).all()
            assert (after[part][name]["factor"] != 1).all()
        np.testing.assert_array_equal(after["mlp"]["down"], before["mlp"]["down"])
        found.append(jax.device_get((metrics["loss"], after)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *found)


LOW = '''"""Llama whose MLPs go through an axis of their own."""

from dataclasses import dataclass

from flax import nnx

from axon.axes import einsum
from axon.nn import Depth, LanguageModel, Param, RMSNorm, Segment
from models import llama


class LowMLP(nnx.Module):
    def __init__(self, dims):
        self.down, self.up = Param("embed low", dims), Param("low embed", dims)

    def __call__(self, x):
        low = einsum("batch seq embed, embed low -> batch seq low", x, self.down)
        return einsum("batch seq low, low embed -> batch seq embed", low, self.up)


class Block(llama.Block):
    def __init__(self, config):
        super().__init__(config)
        self.mlp = LowMLP(config.dims)


@dataclass(frozen=True)
class LowLlama(llama.Llama):
    @property
    def dims(self):
        return super().dims | {"low": 4}

    def build(self):
        norm = RMSNorm("embed", self.dims, self.norm_eps)
        return LanguageModel(self.dims, Depth(Segment(self.layers, block=Block(self))), norm, tied=True)
'''


@pytest.mark.full
def test_a_model_is_served_by_layouts_with_no_row_for_its_own_axis_or_another(folder, train, tmp_path):
    (folder / "low.py").write_text(LOW)
    model = import_module("low").LowLlama(vocab=320, embed=16, layers=2, heads=2, kv_heads=2, mlp=16)
    layout = Layout({"data": 2, "tensor": 2}, rows={"low": None})
    mine = replace(train, model=model, layout=layout, execution=Execution(), run_dir=str(tmp_path / "run"))
    run(mine, steps=2, report=silent)
    trained, split, sampling = open_trained(mine.run_dir), tmp_path / "split.gin", Sampling(8, temperature=0)
    tokenizer, capacity = trained.tokenizer.load(), Capacity(requests=1, length=64)
    request, texts = Request(tuple(tokenizer.prompt("def ")), sampling), set()
    split.write_text("Layout.mesh = {'tensor': 2}\nLayout.rows = {'low': 'tensor', 'mlp': None}\n")
    for file in (None, split):
        (answer,) = answers(engine_of(trained, file, None, capacity, tokenizer, silent), [request])
        texts.add("def " + answer.text)
    assert texts == {generate_text(mine.run_dir, "def ", sampling, silent)}
    export_model(mine.run_dir, tmp_path / "out", ["cpu"], 1, 8, silent)
