"""Adapters as PEFT saves them: what they stand for, as the start of a run, and of a run; beside a model that is served,
of a run too; of another model none."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from axon.checkpoint.huggingface.model import check_base, open_model
from axon.checkpoint.huggingface.peft import ROOT, open_adapter
from axon.checkpoint.huggingface.peft_factors import factors_of
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.config import load
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Routing
from axon.nn.lora import LoRA
from axon.nn.multi_lora import Room
from axon.run import InitFrom, PeftLoRA, beside
from axon.run.adapter import read_factors
from axon.run.beside import ServedAdapters
from axon.run.convert import convert
from axon.run.export_adapter import export_adapter
from axon.run.inspect import evaluate_run, generate_text, logits_of
from axon.run.references import sources_of
from axon.run.served_model import served_model
from axon.run.trained import open_trained
from axon.runtime import Runtime
from axon.serve import answers
from axon.serve.capacity import Capacity
from axon.serve.request import Request, Sampling
from axon.train.optimizers import AdamW, Constant
from models.gpt2 import GPT2
from models.mixtral import Mixtral

ADAPTED = {  # of the tiny Llama: outputs, inputs
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.self_attn.v_proj": (32, 32),
    "model.layers.0.mlp.down_proj": (32, 64),
}
RANK, ALPHA = 3, 12.0
PLACES = {"q_proj": "attention/query", "v_proj": "attention/value", "down_proj": "mlp/down"}


def silent(line):
    pass


@pytest.fixture
def peft(hub, tmp_path, rng):
    """peft(**settings): a random adapter of the model, with these settings besides."""

    def saved(table=False, **settings):
        folder = tmp_path / f"adapter{len([*tmp_path.iterdir()])}"
        folder.mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": str(hub)}
        (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": "all-linear"} | settings))
        arrays = {}
        for name, (outputs, inputs) in ADAPTED.items():
            arrays[f"base_model.model.{name}.lora_A.weight"] = rng.normal(size=(RANK, inputs))
            arrays[f"base_model.model.{name}.lora_B.weight"] = rng.normal(size=(outputs, RANK))
            if settings.get("use_dora"):
                arrays[f"base_model.model.{name}.lora_magnitude_vector"] = rng.uniform(1, 2, size=outputs)
        if settings.get("modules_to_save"):
            arrays[f"{ROOT}model.norm.weight"] = rng.uniform(1, 2, size=32)
        if table:
            arrays["base_model.model.model.embed_tokens.lora_embedding_A"] = rng.normal(size=(RANK, 320))
            arrays["base_model.model.model.embed_tokens.lora_embedding_B"] = rng.normal(size=(32, RANK))
        arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
        save_file(arrays, folder / "adapter_model.safetensors", {"format": "pt"})
        return folder, arrays

    return saved


def merged(hub, arrays, scale, folder):
    """A copy of the model with W + scale · B·A in the place of W, in float64."""
    shutil.copytree(hub, folder)
    weights = load_file(folder / "model.safetensors")
    for name in ADAPTED:
        a, b = (arrays[f"{ROOT}{name}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
        whole = weights[f"{name}.weight"] + scale * b @ a
        if (magnitude := arrays.get(f"{ROOT}{name}.lora_magnitude_vector")) is not None:
            whole *= (magnitude / np.linalg.norm(whole, axis=1))[:, None]
        weights[f"{name}.weight"] = whole.astype(np.float32)
    if f"{ROOT}model.embed_tokens.lora_embedding_A" in arrays:
        a, b = (arrays[f"{ROOT}model.embed_tokens.lora_embedding_{factor}"].astype(np.float64) for factor in "AB")
        weights["model.embed_tokens.weight"] = (weights["model.embed_tokens.weight"] + scale * (b @ a).T).astype(
            np.float32
        )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("stabilized", "table", "dora"), [(False, True, False), (True, False, True)])
def test_an_adapter_is_the_model_with_its_products_added(stabilized, table, dora, hub, peft, few, tmp_path, rng):
    folder, arrays = peft(table, use_rslora=stabilized, use_dora=dora)
    scale = ALPHA / (RANK**0.5 if stabilized else RANK)
    whole = merged(hub, arrays, scale, tmp_path / "whole")
    tokens = rng.integers(0, 320, (2, 12)).astype(np.int32)
    with few(1):
        ours, exact = (logits_of(f"hf:{one}", tokens) for one in (folder, whole))
        assert not np.allclose(ours, logits_of(f"hf:{hub}", tokens), atol=1e-2)
    np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.fixture
def tuning(trained, hub):
    """tuning(adapter, **changes): a run of one step, too small to be seen, that starts from an adapter."""

    def of(adapter, **changes):
        data = replace(trained.train.data, tokenizer=open_trained(f"hf:{hub}").tokenizer)
        made = replace(
            trained.train,
            init_from=InitFrom(f"hf:{hub}", adapter=f"hf:{adapter}"),
            transforms=(PeftLoRA(f"hf:{adapter}"),),
            optimizer=AdamW(Constant(1e-12), weight_decay=0.0),
            data=data,
            steps=1,
            sample=None,
        )
        return replace(made, **changes)

    return of


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("layout", "dora", "more"),
    [(Layout(), False, {"modules_to_save": ["norm"]}), (Layout({"data": 2, "tensor": 2}, zero=3), True, {})],
    ids=["one, and a norm", "DoRA, split"],
)
def test_a_run_starts_from_an_adapter_and_its_own_goes_out_as_it_came(
    layout, dora, more, peft, tuning, do, few, hub, tmp_path, rng
):
    folder, arrays = peft(use_dora=dora, **more)
    train = tuning(folder, layout=layout)
    assert len(train.transforms[0].paths) == len(ADAPTED)
    ran = do(train, tmp_path / "run", devices=layout.mesh.get("tensor", 1) * 2 if layout.zero else 1)
    with few(1):
        export_adapter(str(ran.folder), tmp_path / "out", None, silent)
        found = load_file(tmp_path / "out/adapter_model.safetensors")
        tokens = rng.integers(0, 320, (1, 8)).astype(np.int32)
        logits = [logits_of(str(one), tokens) for one in (ran.folder, f"hf:{tmp_path / 'out'}")]
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "fan_in_fan_out": False, "use_dora": dora}
    assert config.items() >= plain.items()
    assert config["base_model_name_or_path"] == str(hub)
    assert config["target_modules"] == sorted(ADAPTED)
    assert config["modules_to_save"] == (["model.norm"] if more else None)
    with safe_open(tmp_path / "out/adapter_model.safetensors", "numpy") as file:
        assert len(file.metadata()["base_digest"]) == 16


def greedy(path, adapter=None):
    return generate_text(path, "alpha beta", Sampling(8, temperature=0), silent, adapter=adapter)


@pytest.mark.full
def test_beside_a_model_adapters_of_peft_and_of_runs_write_as_merged(peft, tuning, do, few, hub, tmp_path):
    """In one server, and alone."""
    (one, _), (other, _) = peft(table=True), peft(use_rslora=True)
    ran = do(tuning(other), tmp_path / "run")
    sources, capacity = {"one": str(one), "other": str(ran.folder)}, Capacity(requests=2, tokens=16, length=64)
    with few(1):
        served = served_model(f"hf:{hub}", None, None, False, None, False, ServedAdapters(sources), capacity, silent)
        prompt = tuple(served.engine.tokenizer.prompt("alpha beta"))
        requests = [Request(prompt, Sampling(8, temperature=0), adapter=name) for name in (None, "one", "other")]
        found = ["alpha beta" + answer.text for answer in answers(served.engine, requests)]
        assert found == [greedy(f"hf:{hub}"), greedy(f"hf:{one}"), greedy(str(ran.folder))]
        assert found[1:] == [greedy(f"hf:{hub}", source) for source in sources.values()]
        assert len({*found}) == 3
    assert served.read_adapter is None


MORE = {None: {"gate", "up", "down"}, "*/moe/up": {"up"}, "*/attention/*": set(), ("head", "*/q"): {"head"}}
"""`LoRA.paths` → names of weights beside those of the layers that are no experts'."""


@pytest.mark.parametrize("paths", MORE)
def test_there_is_room_beside_experts_and_tables_where_an_adapter_is_of_these(paths, rng, monkeypatch):
    rank, mixtral = int(rng.integers(1, 9)), Mixtral(64, 32, 2, 4, 2, 16, routing=Routing(8, 2))
    monkeypatch.setattr(beside, "adapter_beside", lambda *_: SimpleNamespace(lora=LoRA(paths, rank)))
    trained = SimpleNamespace(train=SimpleNamespace(model=mixtral))
    found = ServedAdapters({"one": "…"}).room("base", trained)
    assert found.rank == rank
    assert (found.paths is None) == (not MORE[paths])
    names = {path.rpartition("/")[2] for path in found.paths or ()}
    assert names - {"query", "key", "value", "out"} == MORE[paths]
    assert ServedAdapters({"one": "…"}, load_more=True, rank=40).room("base", trained) == Room(40, found.paths)


@pytest.mark.full
@pytest.mark.draws(1)
def test_beside_a_run_an_adapter_is_evaluated_as_merged(trained, peft, tuning, do, few, tmp_path):
    folder, _ = peft()
    ran = do(tuning(folder), tmp_path / "run")
    with few(1):
        beside = [evaluate_run(trained.folder, None, 1, silent, str(one)).loss for one in (folder, ran.folder)]
        merged, base = (evaluate_run(one, None, 1, silent).loss for one in (ran.folder, trained.folder))
    assert beside == pytest.approx([merged, merged], rel=1e-4)
    assert abs(merged - base) > 1e-2


def another(hub, folder, *names):
    """A copy of the hub's model, with other weights where a name has one of these parts."""
    shutil.copytree(hub, folder)
    weights = load_file(folder / "model.safetensors")
    changed = {key: value * (1.01 if any(name in key for name in names) else 1) for key, value in weights.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_beside_another_model_an_adapter_is_refused_with_what_differs(peft, tuning, do, few, hub, trained, tmp_path):
    folder, arrays = peft()
    ran = do(tuning(folder), tmp_path / "run")
    with few(1):
        export_adapter(str(ran.folder), tmp_path / "out", None, silent)
        other = another(hub, tmp_path / "other", ".v_proj.", ".q_proj.")
        for adapter in (str(ran.folder), str(tmp_path / "out")):
            with pytest.raises(UserError, match="is an adapter of another model"):
                greedy(f"hf:{other}", adapter)
        wider = json.loads((other / "config.json").read_text()) | {"rope_theta": 12345.0, "rope_parameters": None}
        (other / "config.json").write_text(json.dumps(wider))
        with pytest.raises(UserError, match=r"an adapter of another model, a Llama.*theta"):
            greedy(f"hf:{other}", str(ran.folder))
        renamed = {name.replace("q_proj", "q_prj"): value for name, value in arrays.items()}
        with pytest.raises(UserError, match=r"adapts model\.layers\.0\.self_attn\.q_prj\.weight.*q_proj"):
            greedy(f"hf:{hub}", changed(folder, renamed))
        with pytest.raises(UserError, match=r"0 LoRA in Train\.transforms"):
            greedy(f"hf:{hub}", str(trained.folder))
        with pytest.raises(UserError, match=r"other is no adapter.*adapter_config\.json.*config\.gin"):
            greedy(f"hf:{hub}", str(other))
        with pytest.raises(UserError, match=r"no folder .*/ru\..*'run'"):
            greedy(f"hf:{hub}", str(tmp_path / "ru."))
        with pytest.raises(UserError, match=r"is a model, and no adapter.*adapter_config\.json"):
            greedy(f"hf:{hub}", f"hf:{hub}")


def test_an_adapter_of_another_model_is_refused(peft, tuning, do, few, hub, tmp_path):
    folder, _ = peft()
    ran = do(tuning(folder), tmp_path / "run")
    with few(1):
        export_adapter(str(ran.folder), tmp_path / "out", None, silent)
    other = another(hub, tmp_path / "other", "layers.0.mlp.up_proj.")
    path = tmp_path / "out/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(other)}))
    with pytest.raises(UserError, match=r"out is an adapter of another model than hf:.*other.*digest"):
        open_trained(f"hf:{tmp_path / 'out'}")


def test_an_adapter_is_taken_out_of_a_model_in_which_it_was_merged(peft, tuning, do, few, hub, tmp_path):
    """Of a run bit for bit; of a folder but for half a unit in the last place of the merged weight, and float32's of a
    sum of four products."""
    folder, arrays = peft(use_rslora=True)
    base, ran = load_file(hub / "model.safetensors"), do(tuning(folder), tmp_path / "run")
    whole = merged(hub, arrays, ALPHA / RANK**0.5, tmp_path / "whole")
    with few(1):
        convert(str(ran.folder), f"hf:{tmp_path / 'of_run'}", silent, without=str(ran.folder))
        convert(f"hf:{whole}", f"hf:{tmp_path / 'of_folder'}", silent, without=f"hf:{folder}")
    of_run, found, with_it = (
        load_file(one / "model.safetensors") for one in (tmp_path / "of_run", tmp_path / "of_folder", whole)
    )
    assert base.keys() == of_run.keys() == found.keys()
    for name, value in base.items():
        np.testing.assert_array_equal(of_run[name], value, err_msg=name)
        bound = 8 * np.finfo(np.float32).eps * (np.abs(value) + np.abs(with_it[name]).max())
        assert np.all(np.abs(found[name] - value) <= (bound if f"{name.removesuffix('.weight')}" in ADAPTED else 0)), (
            name
        )
    for settings, said in (
        ({"use_dora": True}, "scales the weights too"),
        ({"modules_to_save": ["norm"]}, "norm.weight anew"),
    ):
        with pytest.raises(UserError, match=said):
            convert(f"hf:{whole}", f"hf:{tmp_path / 'other'}", silent, without=f"hf:{peft(**settings)[0]}")
    for source, target, without in (("run", "hf:out", "hf:x"), ("hf:x", "run", "hf:y"), ("run", "hf:out", "other")):
        with pytest.raises(UserError, match=rf"--without {without}: write axon convert RUN hf:DIR --without RUN"):
            convert(source, target, silent, without=without)


def changed(folder, arrays, settings=None):
    """An adapter with other arrays, or other settings."""
    save_file(arrays, folder / "adapter_model.safetensors", {"format": "pt"})
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (settings or {})))
    return f"hf:{folder}"


def test_what_an_adapter_has_that_the_model_has_not_is_named(peft):
    folder, arrays = peft()
    renamed = {name.replace("q_proj", "q_prj"): value for name, value in arrays.items()}
    with pytest.raises(UserError, match=r"adapts model\.layers\.0\.self_attn\.q_prj\.weight.*q_proj"):
        open_trained(changed(folder, renamed))
    narrow = {name: value[:, :-1].copy() if "down_proj.lora_A" in name else value for name, value in arrays.items()}
    with pytest.raises(UserError, match=r"down_proj\.weight as \(32, 63\).*\(32, 64\)"):
        open_trained(changed(folder, narrow))
    alone = {name: value for name, value in arrays.items() if "v_proj.lora_B" not in name}
    with pytest.raises(UserError, match=r"v_proj\.lora_A\.weight, without its other factor"):
        open_trained(changed(folder, alone))
    with pytest.raises(UserError, match=r"lora_A\.weight, without its other factor.*lora_magnitude_vector"):
        open_trained(changed(folder, arrays, {"use_dora": True}))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_lora_weights": "olora"}, r"init_lora_weights is 'olora'.*path_initial_model_for_weight_conversion"),
        ({"layer_replication": [[0, 1], [0, 1]]}, r"layer_replication is \[\[0, 1\], \[0, 1\]\]"),
        ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern is"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is"),
        ({"rank_pattern": {"(": 3}}, r"a pattern of \['\('\] is no regular expression"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens is"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_the_field_that_says_so(settings, named, peft):
    folder, arrays = peft()
    with pytest.raises(UserError, match=rf"adapter_config\.json: {named}"):
        open_trained(changed(folder, arrays, settings))


def test_beside_a_model_an_adapter_of_dora_is_refused_with_how_to_name_it(peft, hub, few):
    folder, _ = peft(use_dora=True)
    with few(1), pytest.raises(UserError, match=rf"an adapter of DoRA.*name it as the model.*hf:{folder}"):
        greedy(f"hf:{hub}", str(folder))
    folder, _ = peft(modules_to_save=["norm"])
    with few(1), pytest.raises(UserError, match=r"has other parameters of the model anew.*norm/scale.*as the model"):
        greedy(f"hf:{hub}", str(folder))


def test_a_reference_without_adapters_is_said_to_be_without_the_one_that_the_run_starts_from(peft, tuning):
    folder, _ = peft()
    frozen, lines = SimpleNamespace(runtimes={}, bases={"reference": None}), []
    assert sources_of(tuning(folder), frozen, lines.append) == {}
    (line,) = lines
    assert "frozen model 'reference'" in line
    assert f"Reference.source = 'hf:{folder}'" in line
    sources_of(replace(tuning(folder), init_from=None), frozen, lines.append)
    assert len(lines) == 1


def test_another_scale_is_refused_with_what_to_set(peft, tuning, do, tmp_path):
    folder, _ = peft()
    mine = tuning(folder)
    wrong = replace(mine, transforms=(replace(mine.transforms[0], alpha=1.0),))
    with pytest.raises(UserError, match=r"InitFrom\.adapter.*scale 4, and LoRA here has 0\.333333.*@PeftLoRA"):
        do(wrong, tmp_path / "run")


def checked(adapter, model, base=None, name=None):
    """Compares an adapter with a model, one or both of which are called otherwise than they are."""
    opened, model = open_adapter(adapter, Path(adapter.removeprefix("hf:"))), open_model(model)
    check_base(replace(opened, base=base or opened.base), replace(model, name=name or model.name))


def test_an_adapter_of_peft_is_refused_beside_another_model_as_far_as_that_can_be_told(peft, hub, tmp_path, rng):
    """By every number, where its own model is here; else by the names of the hub."""
    folder, _ = peft()
    shutil.copytree(hub, other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = str(rng.choice(sorted(weights)))
    weights[name].flat[-1] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    adapter, another_model = f"hf:{folder}", "is an adapter of another model than"
    checked(adapter, f"hf:{hub}")
    shutil.copytree(hub, tmp_path / "same")
    checked(adapter, f"hf:{tmp_path / 'same'}")
    with pytest.raises(UserError, match=rf"{another_model} hf:.*other: it was trained beside hf:{hub}"):
        checked(adapter, f"hf:{other}")
    checked(adapter, f"hf:{other}", base="hf:owner/one")
    checked(adapter, f"hf:{other}", base="hf:owner/one", name="hf:owner/one@main")
    with pytest.raises(
        UserError, match=rf"{another_model} hf:owner/two: .*names hf:owner/one .base_model_name_or_path"
    ):
        checked(adapter, f"hf:{other}", base="hf:owner/one", name="hf:owner/two")


def test_ranks_and_scales_by_pattern_are_those_of_the_largest_rank_with_zeros(peft, hub, rng):
    """A row of A and its column of B that are both 0 have no gradient."""
    settings = {"rank_pattern": {"v_proj": 2, "down_proj": 5}, "alpha_pattern": {r"self_attn\.v_proj": 7.0}}
    folder, arrays = peft()
    for (name, (outputs, inputs)), rank in zip(ADAPTED.items(), (RANK, 2, 5), strict=True):
        for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            arrays[f"{ROOT}{name}.lora_{factor}.weight"] = rng.normal(size=shape).astype(np.float32)
    adapter = changed(folder, arrays, settings)
    lora, model = PeftLoRA(adapter), open_model(f"hf:{hub}")
    assert (lora.rank, lora.scale) == (5, ALPHA / RANK)
    found = read_factors(adapter, model, Runtime(model.model, Layout(), devices=jax.devices()[:1], transforms=(lora,)))
    for name, scale, rank in zip(ADAPTED, (ALPHA / RANK, 7 / 2, ALPHA / 5), (RANK, 2, 5), strict=True):
        of_b, of_a = (arrays[f"{ROOT}{name}.lora_{factor}.weight"] for factor in "BA")
        (path,) = [one for one in lora.paths if PLACES[name.rpartition(".")[2]] in one]
        a, b = (np.asarray(found[f"{path}/{factor}"])[0] for factor in "ab")
        a, b = a.reshape(-1, 5), b.reshape(5, -1)
        np.testing.assert_allclose(lora.scale * (a @ b).T, scale * of_b @ of_a, rtol=1e-4, atol=1e-4)
        assert not a[:, rank:].any()
        assert not b[rank:].any()


def test_weights_that_are_one_array_of_theirs_share_a_factor_and_lie_as_theirs():
    model = GPT2(vocab=64, embed=16, layers=2, heads=2, positions=32)
    runtime = Runtime(model, Layout(), devices=jax.devices()[:1], transforms=(LoRA(rank=2),))
    pieces = pieces_of(table_for(model), model.build(), 64)
    found = factors_of(pieces, runtime.parameters, runtime.operands)
    assert found.transposed
    shared = {f"{ROOT}transformer.h.{layer}.attn.c_attn.lora_A.weight" for layer in range(2)}
    assert found.shared in (shared, frozenset())
    assert found.pieces.shapes[f"{ROOT}transformer.h.1.attn.c_attn.lora_B.weight"] == (48, 2)
    assert found.pieces.shapes[f"{ROOT}transformer.h.0.mlp.c_fc.lora_A.weight"] == (2, 16)


def test_a_config_names_an_adapter(peft, hub, tmp_path):
    folder, _ = peft()
    (tmp_path / "tune.gin").write_text(
        f"Train.model = @Hub()\nHub.source = 'hf:{hub}'\nTrain.init_from = @InitFrom()\nInitFrom.source = 'hf:{hub}'\n"
        f"InitFrom.adapter = 'hf:{folder}'\nTrain.transforms = (@PeftLoRA(),)\nPeftLoRA.source = 'hf:{folder}'\n"
        "Train.data = @Chats()\nChats.seq = 64\nChats.batch = 2\nChats.sources = (@Words(),)\n"
        "Words.task = 'reverse'\nTrain.optimizer = @AdamW()\n"
        "Chats.tokenizer = @HubTokenizer()\nHubTokenizer.source = %hub\nAdamW.schedule = @Constant()\n"
        f"Constant.peak = 1e-3\nTrain.steps = 1\nhub = 'hf:{hub}'\nLoRA.base = 'bfloat16'\n"
    )
    (lora,) = load(tmp_path / "tune.gin").tree.transforms
    assert lora == replace(PeftLoRA(f"hf:{folder}"), base="bfloat16")
