"""A run whose model's weights a transform changes: LoRA by configuration alone, from a run or a folder of the hub's."""

import json
from dataclasses import replace

import numpy as np
import pytest
from reports import silent

from axon.checkpoint import Reader
from axon.config import dump, load
from axon.errors import UserError
from axon.layout import Layout
from axon.nn.lora import LoRA
from axon.nn.quantized import Quantize
from axon.run import program
from axon.run.convert import convert
from axon.run.export_adapter import export_adapter
from axon.run.inspect import evaluate_run, generate_text, logits_of
from axon.run.trained import open_trained
from axon.runtime import flattened, nested
from axon.serve.request import Sampling
from axon.train.adapters_off import AdaptersOff
from axon.train.optimizers import AdamW, Constant, Group, OneBitAdam
from axon.train.preference import DPO
from axon.train.references import References

ADAPT = (LoRA(rank=4, others=("norm/*",)),)
SPLIT = Layout({"data": 2, "tensor": 2}, zero=3)


@pytest.fixture(scope="module")
def adapting(trained, hub):
    """A run that adapts it, an unmodified model."""
    data = replace(trained.train.data, tokenizer=open_trained(f"hf:{hub}").tokenizer)
    optimizer = AdamW(Constant(3e-3), groups=(Group("norm/*", rate=0.1),))
    return replace(
        trained.train, init_from=f"hf:{hub}", transforms=ADAPT, optimizer=optimizer, data=data, steps=6, sample=None
    )


@pytest.fixture(scope="module")
def adapted(adapting, do, tmp_path_factory):
    """It, done on a layout that splits everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXON_CACHE", str(tmp_path_factory.mktemp("cache")))
        return do(replace(adapting, layout=SPLIT), tmp_path_factory.mktemp("runs") / "adapted", devices=4)


def stored(ran, few, layout=Layout()):
    """The last checkpoint's parameters, by path."""
    with few(8):
        made = program(replace(ran.train, layout=layout))
        return flattened(
            Reader(ran.folder / "checkpoints").restore_parts({"parameters": made.abstract_state().parameters})[
                "parameters"
            ]
        ), made


@pytest.mark.full
@pytest.mark.draws(1)
def test_its_file_is_the_same_tree(adapted, tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(dump(adapted.train))
    assert load(file).tree == adapted.train
    assert "LoRA.rank = 4" in file.read_text()


def test_the_base_is_the_hubs_bit_for_bit_and_only_adapters_have_a_state(adapted, hub, few):
    with few(1):
        begun, made = stored(adapted, few, Layout({"data": 1}))
        base = open_trained(f"hf:{hub}").read(made.runtime, {path: path for path in made.runtime.declared})
    moments = flattened(made.abstract_state().optimizer["direction"].mu)
    assert set(moments) == {p for p in begun if p.endswith(("/a", "/b")) or p.startswith("norm/")}
    for path, value in base.items():
        if not path.startswith("norm/"):
            np.testing.assert_array_equal(begun[f"{path}/base" if path in made.runtime.operands else path], value)
    assert all(np.any(value) for path, value in begun.items() if path.endswith("/b"))
    assert np.any(begun["norm/scale"] != base["norm/scale"])
    assert any("numbers train" in line for line in adapted.lines)


@pytest.mark.full
def test_a_stopped_run_continues_bit_for_bit(adapted, adapting, do, few, tmp_path):
    half = replace(adapting, layout=SPLIT)
    do(half, tmp_path / "run", devices=4, steps=3)
    ran = do(half, tmp_path / "run", devices=4)
    for (path, one), other in zip(stored(ran, few)[0].items(), stored(adapted, few)[0].values(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=path)


@pytest.mark.full
@pytest.mark.draws(1)
def test_evaluation_generation_logits_and_the_hubs_form_are_the_merged_model(adapted, few, tmp_path):
    greedy = Sampling(tokens=12, temperature=0)
    with few(1):
        texts = {generate_text(str(adapted.folder), "alpha beta", greedy, silent)}
        tokens = np.random.default_rng(0).integers(0, 300, (1, 8)).astype(np.int32)
        ours = logits_of(str(adapted.folder), tokens)
        convert(str(adapted.folder), f"hf:{tmp_path / 'merged'}", silent)
        merged = f"hf:{tmp_path / 'merged'}"
        np.testing.assert_allclose(ours, logits_of(merged, tokens), rtol=1e-5, atol=1e-5)
        texts.add(generate_text(merged, "alpha beta", greedy, silent))
        assert len(texts) == 1
        found = evaluate_run(str(adapted.folder), None, adapted.train.evaluation.batches, silent)
        narrow = {generate_text(one, "alpha beta", greedy, silent, "int8") for one in (str(adapted.folder), merged)}
    assert len(narrow) == 1
    last = json.loads((adapted.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.draws(1)
def test_another_run_starts_from_the_merged_weights(adapted, trained, do, few, tmp_path):
    changed = {"transforms": (), "steps": 1, "optimizer": AdamW(Constant(1e-9)), "layout": Layout()}
    mine = replace(adapted.train, init_from=str(adapted.folder), **changed)
    ran = do(mine, tmp_path / "next")
    now, _ = stored(ran, few)
    parts, made = stored(adapted, few, Layout({"data": 1}))
    for path, value in made.runtime.merged(parts).items():
        np.testing.assert_allclose(now[path], value, atol=1e-6, err_msg=path)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_group_of_the_optimizer_gives_b_a_rate_of_its_own(adapting, few, rng):
    """LoRA+, as docs/adapters.md writes it."""
    faster = AdamW(Constant(1e-3), groups=(Group("*/b", rate=16.0),))
    with few(1):
        made = program(replace(adapting, optimizer=faster, transforms=(LoRA(rank=4),)))
        batch = {name: np.zeros(spec.shape, spec.dtype) for name, spec in made.evaluator.specs.items()}
        batch |= {name: rng.integers(0, 300, batch[name].shape, np.int32) for name in ("tokens", "targets")}
        batch["weights"] += 1
        begun = {path: np.asarray(x) for path, x in flattened(made.init().parameters).items()}
        begun |= {p: rng.normal(size=x.shape).astype(x.dtype) / 9 for p, x in begun.items() if p.endswith("/b")}
        state, _ = made.step(made.begin(nested(begun)), made.place(batch))
    moved = {path: np.abs(value - begun[path]) for path, value in flattened(state.parameters).items()}
    for factor, rate in (("/a", 1e-3), ("/b", 16e-3)):
        steps = np.concatenate([one.ravel() for path, one in moved.items() if path.endswith(factor)])
        np.testing.assert_allclose(np.median(steps), rate, rtol=2e-2)


def test_what_cannot_freeze_is_refused_with_both_names(adapting):
    with pytest.raises(UserError) as found:
        program(replace(adapting, optimizer=OneBitAdam(Constant(1e-3), 10), layout=Layout({"replica": 2})))
    assert "OneBitAdam" in str(found.value)
    assert "Train.transforms = LoRA" in str(found.value)


@pytest.mark.full
def test_a_base_in_8_bits_is_made_of_the_source_and_its_adapters_train(adapting, adapted, hub, do, few, tmp_path):
    mine = replace(adapting, transforms=(Quantize("int8"), *ADAPT), layout=SPLIT)
    file = tmp_path / "run.gin"
    file.write_text(dump(mine))
    assert load(file).tree == mine
    do(mine, tmp_path / "run", devices=4, steps=3)
    ran = do(mine, tmp_path / "run", devices=4)
    now, made = stored(ran, few)
    base = open_trained(f"hf:{hub}").read(made.runtime, {path: path for path in made.runtime.declared})
    path = "layers/block/mlp/up"
    whole = {name: now[f"{path}/base/{name}"] for name in ("values", "scales")}
    assert whole["values"].dtype == np.int8
    exact = made.runtime.operands[path].base.derived(base[path])
    for name, value in whole.items():
        np.testing.assert_array_equal(value, exact[name])
    assert np.any(now[f"{path}/b"])
    losses = [
        json.loads((one.folder / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"] for one in (ran, adapted)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    with few(1):
        merged = evaluate_run(str(ran.folder), None, ran.train.evaluation.batches, silent)
    assert merged.loss == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["DoRA", "LoRA"])
def test_begun_as_pissa_a_run_starts_as_the_model_and_its_adapter_is_of_the_model(
    dora, adapting, hub, do, few, tmp_path, rng
):
    tokens = rng.integers(0, 300, (1, 8)).astype(np.int32)
    lora = LoRA(rank=4, init="pissa", dora=dora)
    mine = replace(adapting, transforms=(lora,), optimizer=AdamW(Constant(3e-3)))
    ran = do(replace(mine, layout=SPLIT, steps=2), tmp_path / "run", devices=4)
    with few(1):
        made = program(replace(ran.train, layout=Layout()))
        source = open_trained(f"hf:{hub}")
        read = source.read(made.runtime, {path: path for path in made.runtime.declared})
        begun = flattened(nested({path: made.runtime.derived(path, value) for path, value in read.items()}))
        for path, value in made.runtime.merged(begun).items():
            np.testing.assert_allclose(value, read[path], atol=1e-6, err_msg=path)
        export_adapter(str(ran.folder), tmp_path / "out", None, silent)
        ours, exact = (logits_of(one, tokens) for one in (str(ran.folder), f"hf:{tmp_path / 'out'}"))
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-4)
        assert np.max(np.abs(ours - logits_of(f"hf:{hub}", tokens))) > 1e-3
        with pytest.raises(UserError, match="an adapter of DoRA" if dora else "axon export .*--adapter"):
            generate_text(f"hf:{hub}", "alpha", Sampling(1), silent, adapter=str(ran.folder))
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == 8
    with pytest.raises(UserError, match=r"AdaptersOff\(\), and .*PiSSA takes a part"):
        References.of(DPO(), {"reference": AdaptersOff()}, made.runtime, 8)
