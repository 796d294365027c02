"""A run that trains several adapters at once, and each of them by its name wherever a model is named."""

import json
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
import pytest
from reports import silent
from safetensors.numpy import load_file

from axon.checkpoint import Reader
from axon.config import dump, load
from axon.data import JsonLines
from axon.data.feed import FeedContext
from axon.data.prepared import Question
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Routing
from axon.nn.lora import LoRA
from axon.observe.lines import read_lines
from axon.run import Evaluation, InitFrom, Sample, program
from axon.run.answers import Answered, answers_of
from axon.run.convert import convert
from axon.run.export_adapter import export_adapter
from axon.run.inspect import evaluate_run, restored
from axon.run.reporting import RunReport
from axon.run.trained import open_trained
from axon.serve.logits import logits
from axon.serve.offline import Answer, write
from axon.serve.request import Finish, Request, Sampling
from axon.train.adapters_off import AdaptersOff
from axon.train.optimizers import AdamW, Constant
from axon.train.preference import DPO
from axon.tune import Chats, Comparisons
from axon.tune.episodes import Episode
from models.mixtral import Mixtral

ANSWERS = {"turn": lambda word: word[::-1], "copy": lambda word: word}
NAMES = tuple(ANSWERS)
SPLIT = Layout({"data": 2, "tensor": 2}, zero=3)


def written(path, answer, rng):
    """A file of questions, random words, and what `answer` makes of each."""
    words = ["".join(rng.choice([*"abcdefgh"], size=rng.integers(2, 7))) for _ in range(60)]
    path.write_text("".join(json.dumps({"prompt": word, "completion": answer(word)}) + "\n" for word in words))
    return JsonLines(str(path))


@pytest.fixture(scope="module")
def at_once(trained, hub, tmp_path_factory, shared_seed):
    """A run that tunes the hub's model on two files, an adapter for each."""
    folder, rng = tmp_path_factory.mktemp("chats"), np.random.default_rng(shared_seed)
    sources = (
        written(folder / "turned.jsonl", ANSWERS["turn"], rng),
        written(folder / "copied.jsonl", ANSWERS["copy"], rng),
        written(folder / "more.jsonl", ANSWERS["turn"], rng),
    )
    chats = Chats(
        seq=48,
        batch=8,
        sources=sources,
        adapters=("turn", "copy", "turn"),
        weights=(1, 2, 1),
        tokenizer=open_trained(f"hf:{hub}").tokenizer,
        held_out=0.3,
        packed=2,
    )
    return replace(
        trained.train,
        data=chats,
        init_from=f"hf:{hub}",
        transforms=(LoRA(rank=2, adapters=NAMES),),
        optimizer=AdamW(Constant(1e-2)),
        steps=4,
        evaluation=Evaluation(every=4, batches=None),
        sample=None,
    )


@pytest.fixture(scope="module")
def ran(at_once, do, tmp_path_factory):
    return do(replace(at_once, layout=SPLIT), tmp_path_factory.mktemp("runs") / "both", devices=4)


def logits_by(name, adapter=None):
    tokens = np.random.default_rng(0).integers(0, 300, (2, 9)).astype(np.int32)
    return logits(*restored(open_trained(name), silent, adapter=adapter), tokens)


@pytest.mark.full
@pytest.mark.draws(1)
def test_its_file_is_the_same_tree(ran, tmp_path):
    (tmp_path / "run.gin").write_text(dump(ran.train))
    assert load(tmp_path / "run.gin").tree == ran.train


def test_a_sequence_has_examples_of_one_adapter_and_says_which(at_once):
    prepared: Any = at_once.data.prepare(silent)
    split = prepared.splits["train"]
    with prepared.feed(FeedContext(0, cast(Any, None))) as feed:
        batch = feed.draw(cast(Any, None))
    for row, numbers in enumerate(np.asarray(prepared._order(0)[0])):
        own = {at_once.data.adapters[split.examples[one].source] for one in split.rows[numbers]}
        assert own == {NAMES[batch["adapters"][row]]}
    assert split.batch(np.array([-1]))["adapters"].tolist() == [-1]


@pytest.mark.full
@pytest.mark.draws(1)
def test_each_adapters_loss_is_recorded_and_printed(ran):
    records = read_lines(ran.folder / "metrics.jsonl", {})
    for name in NAMES:
        assert all(one[f"loss/{name}"] > 0 for one in records if "loss" in one)
        assert f"{name} {records[-1][f'eval_loss/{name}']:.4f}" in "\n".join(ran.lines)


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_adapter_is_evaluated_on_its_own_held_out_data(ran, few):
    last = read_lines(ran.folder / "metrics.jsonl", {})[-1]
    with few(1):
        found = {name: evaluate_run(f"{ran.folder}:{name}", None, None, silent) for name in NAMES}
    for name, one in found.items():
        assert one.loss == pytest.approx(last[f"eval_loss/{name}"], rel=1e-5)
    assert sum(one.loss * one.count for one in found.values()) / sum(
        one.count for one in found.values()
    ) == pytest.approx(last["eval_loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.draws(1)
def test_peft_has_a_folder_of_each_which_loads_alone_and_is_used_beside_the_base(ran, hub, few, tmp_path):
    with few(1):
        export_adapter(str(ran.folder), tmp_path / "out", None, silent)
        by_name = {name: logits_by(f"{ran.folder}:{name}") for name in NAMES}
        assert np.abs(by_name["turn"] - by_name["copy"]).max() > 1e-2
        for name, own in by_name.items():
            for other in (
                logits_by(f"hf:{tmp_path / 'out' / name}"),
                logits_by(f"hf:{hub}", f"hf:{tmp_path / 'out' / name}"),
                logits_by(f"hf:{hub}", f"{ran.folder}:{name}"),
            ):
                np.testing.assert_allclose(other, own, rtol=1e-4, atol=1e-4)
        export_adapter(f"{ran.folder}:copy", tmp_path / "one", None, silent)
    assert (tmp_path / "one" / "adapter_config.json").is_file()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(NAMES)


@pytest.mark.full
@pytest.mark.draws(1)
def test_adapters_of_experts_matrices_have_a_folder_of_peft_each(at_once, trained, do, few, tmp_path):
    experts = Mixtral(trained.train.model.vocab, 16, 1, 2, 2, 24, Routing(4, 2))
    base = do(replace(trained.train, model=experts, steps=1, evaluation=None, sample=None), tmp_path / "base")
    with few(1):
        convert(str(base.folder), f"hf:{tmp_path / 'hub'}", silent)
    tuned = {"model": experts, "init_from": f"hf:{tmp_path / 'hub'}", "layout": Layout({"expert": 2})}
    ran = do(replace(at_once, **tuned, steps=2, evaluation=None), tmp_path / "both", devices=2)
    with few(1):
        export_adapter(str(ran.folder), tmp_path / "out", None, silent)
        by_name = {name: logits_by(f"{ran.folder}:{name}") for name in NAMES}
        for name, own in by_name.items():
            np.testing.assert_allclose(logits_by(f"hf:{tmp_path / 'out' / name}"), own, rtol=1e-4, atol=1e-4)
    factors = [load_file(tmp_path / "out" / name / "adapter_model.safetensors") for name in NAMES]
    of_experts = [name for name in factors[0] if ".experts.3." in name and "lora_B" in name]
    assert of_experts
    assert all(np.abs(one[name]).max() > 0 for one in factors for name in of_experts)


def stored(ran, few):
    with few(4):
        state = program(ran.train).abstract_state()
        return jax.device_get(Reader(ran.folder / "checkpoints").restore(state)[0])


@pytest.mark.full
def test_a_stopped_run_continues_bit_for_bit_and_so_does_a_branch(ran, do, few, tmp_path):
    do(ran.train, tmp_path / "half", devices=4, steps=2)
    branch = replace(ran.train, init_from=InitFrom(str(tmp_path / "half"), optimizer=True))
    for again in (do(branch, tmp_path / "branch", devices=4), do(ran.train, tmp_path / "half", devices=4)):
        jax.tree.map(np.testing.assert_array_equal, stored(again, few), stored(ran, few))


def test_answers_are_counted_by_adapter(hub):
    questions = [Question((1,), (number,)) for number in range(9)]
    episodes = [Episode.of_answer(Answer((number,), "", Finish.STOP)) for number in range(9)]
    tokenizer = open_trained(f"hf:{hub}").tokenizer.load()
    whose = ["turn"] * 4 + ["copy"] * 5
    exact = np.array([1, 0, 1, 1, 0, 0, 1, 0, 0], float)
    found = Answered(questions, episodes, tokenizer, {"exact": exact}, whose)
    assert found.metrics() == pytest.approx({"exact": 4 / 9, "exact/turn": 0.75, "exact/copy": 0.2})
    assert str(found) == "44.4% of answers right (turn 75.0%, copy 20.0%)"
    assert [(one["adapter"], one["scores"]["exact"]) for one in found.shown()] == [*zip(whose, exact, strict=True)]


@pytest.mark.full
def test_each_adapter_answers_its_own_questions(at_once, do, few, tmp_path):
    asked = Evaluation(every=2, batches=1, answers=5)
    ran = do(replace(at_once, steps=2, evaluation=asked), tmp_path / "asked")
    last, said = read_lines(ran.folder / "metrics.jsonl", {})[-1], "\n".join(ran.lines)
    RunReport(ran.folder).write_page(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    for name in NAMES:
        assert f"{name} {last[f'eval_exact/{name}']:.1%}" in said
        assert f"<figcaption>exact/{name}<" in page
        assert f"<small>{name}</small>" in page
    with few(1):
        made, prepared = program(ran.train), ran.train.data.prepare(silent)
        state = Reader(ran.folder / "checkpoints").restore(made.abstract_state())[0]
        answers, own = answers_of(ran.train, prepared, made), []
        for name in NAMES:
            questions = prepared.questions(5, name)
            assert all(ANSWERS[name](one.record["prompt"]) == one.record["completion"] for one in questions)
            requests = [Request(one.prompt, Sampling(len(one.answer), temperature=0)) for one in questions]
            alone = restored(open_trained(f"{ran.folder}:{name}"), silent)
            own += [one.ids for one in write(*alone, prepared.tokenizer, requests)]
        right = [True] * 5 + [number % 3 > 0 for number in range(5)]
        answers._questions = [
            replace(one, answer=ids if is_right else (0,))
            for one, ids, is_right in zip(answers._questions, own, right, strict=True)
        ]
        assert answers(state).metrics() == pytest.approx({"exact": 0.8, "exact/turn": 1.0, "exact/copy": 0.6})


@pytest.mark.full
def test_adapters_of_preferences_have_an_accuracy_of_their_own(at_once, do, few, tmp_path):
    sources = []
    for name, answer in ANSWERS.items():
        words = {record["prompt"] for _, record in at_once.data.sources[NAMES.index(name)].records()}
        pairs = [{"prompt": word, "chosen": answer(word), "rejected": "z"} for word in sorted(words)]
        (path := tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        sources.append(JsonLines(str(path)))
    data = Comparisons(64, 8, tuple(sources), at_once.data.tokenizer, adapters=NAMES, packed=2, held_out=0.3)
    tuned = {"data": data, "objective": DPO(pairs=2), "references": {"reference": AdaptersOff()}}
    ran = do(replace(at_once, **tuned, steps=2, evaluation=Evaluation(every=2, batches=None)), tmp_path / "pairs")
    last = read_lines(ran.folder / "metrics.jsonl", {})[-1]
    with few(1):
        found = {name: evaluate_run(f"{ran.folder}:{name}", None, None, silent) for name in NAMES}
    for name, one in found.items():
        assert one.loss == pytest.approx(last[f"eval_loss/{name}"], rel=1e-5)
        assert one.others["accuracy"] == last[f"eval_accuracy/{name}"]
        assert f"{name} {one.loss:.4f} (accuracy {one.others['accuracy']:.4f})" in "\n".join(ran.lines)


@pytest.mark.full
@pytest.mark.draws(1)
def test_another_run_starts_from_an_adapter(ran, do, few, tmp_path):
    changed = {"transforms": (), "steps": 1, "evaluation": None, "optimizer": AdamW(Constant(1e-9)), "layout": Layout()}
    data = replace(ran.train.data, adapters=())
    mine = do(replace(ran.train, init_from=f"{ran.folder}:copy", data=data, **changed), tmp_path / "next")
    with few(1):
        np.testing.assert_allclose(logits_by(str(mine.folder)), logits_by(f"{ran.folder}:copy"), atol=1e-4)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(("name", "said"), [("", "not one model: several"), (":cpoy", "no adapter 'cpoy'")])
def test_a_name_of_no_adapter_is_refused_with_those_there_are(ran, name, said):
    with pytest.raises(UserError, match=said) as error:
        open_trained(f"{ran.folder}{name}")
    assert f"{ran.folder}:turn" in str(error.value)


def test_a_run_of_one_adapter_has_no_names(trained):
    with pytest.raises(UserError, match=r"does not train several adapters at once \(LoRA.adapters\)"):
        open_trained(f"{trained.folder}:turn")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda train: {"transforms": (LoRA(),)}, ("LoRA.adapters is ()", "Chats.adapters")),
        (lambda train: {"transforms": (LoRA(adapters=NAMES[::-1]),)}, ("LoRA.adapters", "one order")),
        (lambda train: {"sample": Sample("a")}, ("Train.sample", "axon generate RUN:turn")),
        (lambda train: {"data": train.data.text}, ("LoRA.adapters", "@Chats()")),
        (lambda train: {"data": replace(train.data, adapters=("turn",))}, ("1 names for 3 sources",)),
    ],
    ids=range(5),
)
def test_a_mistake_is_named_with_the_way_out(at_once, change, said):
    with pytest.raises(UserError) as error:
        replace(at_once, **change(at_once))
    for part in said:
        assert part in str(error.value)
