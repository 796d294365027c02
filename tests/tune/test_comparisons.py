"""Pairs of answers: recognised by their columns, both in one sequence, and learned from."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from axon.data import Bpe, JsonLines
from axon.errors import UserError
from axon.nn.lora import LoRA
from axon.observe.lines import read_lines
from axon.run import Evaluation, program
from axon.run.inspect import evaluate_run, generate_text
from axon.serve.request import Sampling
from axon.train.adapters_off import AdaptersOff
from axon.train.objective import NextToken
from axon.train.preference import DPO, SimPO
from axon.tune import Comparisons, Words
from axon.tune.formats import PAIRS, Conversation, read_example

USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("ho", "hu"))
SHAPES = {
    "texts": {"prompt": "hi", "chosen": "ho", "rejected": "hu"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole chats": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "a message each": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "LLaMA-Factory's": {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "ho"},
        "rejected": {"from": "gpt", "value": "hu"},
    },
    "whole chats beside their prompt": {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
}


def silent(line):
    pass


def comparisons(path, records, **fields):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {"seq": 64, "batch": 2, "tokenizer": Bpe(vocab=257), "held_out": 0.0, "threads": 0}
    return Comparisons(**{**defaults, "sources": (JsonLines(str(path)),), **fields})


@pytest.mark.parametrize("name", SHAPES)
def test_one_pair_has_many_shapes(name):
    assert read_example(SHAPES[name], "here", PAIRS) == (Conversation((USER, GOOD)), Conversation((USER, BAD)))


def test_a_ranked_list_is_each_pair_of_its_answers_in_one_split(tmp_path, rng, caches):
    letters = ["".join(rng.choice([*"abcd"], size=5)) + end for end in "wxyz"]
    records = [{"system": "s", "prompt": f"{number}", "ranked": letters} for number in range(20)]
    pairs = [{"system": "s", "prompt": "0", "chosen": a, "rejected": b} for a, b in combinations(letters, 2)]
    expected = tuple(side for one in pairs for side in read_example(one, "here", PAIRS))
    assert read_example(records[0], "here", PAIRS) == expected
    prepared = comparisons(tmp_path / "x.jsonl", records, seq=128, held_out=0.5).prepare(silent)
    places = {name: [one.where for one in split.examples] for name, split in prepared.splits.items()}
    assert sorted(map(places["train"].count, {*places["train"]})) == [6] * len({*places["train"]})
    assert len(places["train"]) + len(places["held_out"]) == 6 * 20
    assert not {*places["train"]} & {*places["held_out"]}


def test_a_pair_is_in_one_sequence_chosen_first_and_its_answers_alone_are_compared(tmp_path, rng, caches):
    words = ["".join(rng.choice([*"abcd"], size=4)) for _ in range(6)]
    records = [{"prompt": word, "chosen": word + "x", "rejected": "y" + word} for word in words]
    prepared = comparisons(tmp_path / "x.jsonl", records, seq=128, packed=2).prepare(silent)
    batch, found = prepared.splits["train"].batch(np.arange(3)), []
    assert batch.keys() == prepared.arrays.keys() == SimPO().specs(2, 64).keys()
    for row in range(3):
        for answer in range(4):
            own = batch["answers"][row] == answer
            np.testing.assert_array_equal(batch["positions"][row][own], np.arange(own.sum()))
            learned = batch["targets"][row][own & (batch["weights"][row] == 1)]
            found.append((prepared.tokenizer.decode(batch["tokens"][row][own]), prepared.tokenizer.decode(learned)))
    end = "\n<|endoftext|>"
    assert found == [
        (f"<|endoftext|>user: {one['prompt']}\nassistant: {one[side]}{end}", f" {one[side]}{end}")
        for one in records
        for side in ("chosen", "rejected")
    ]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ("x.jsonl:1", "'rejected'", "leave the record out")),
        ({"chosen": [USER], "rejected": [USER, BAD]}, ("x.jsonl:1", "chosen", "add one")),
        ({"prompt": "a", "ranked": ["b"]}, ("x.jsonl:1", "'ranked'", "two answers or more")),
        ({"prompt": "a", "ranked": ["b", "c", "b"]}, ("x.jsonl:1", "'ranked'", "leave the record out")),
        ({"prompt": "a", "better": "b"}, ("x.jsonl:1", "'better'", "chosen and rejected", "columns")),
    ],
)
def test_pairs_that_compare_nothing_are_named_by_place_and_remedy(record, said, tmp_path, caches):
    with pytest.raises(UserError) as error:
        comparisons(tmp_path / "x.jsonl", [record]).prepare(silent)
    for part in said:
        assert part in str(error.value)


@pytest.fixture(scope="module")
def preferring(tiny):
    data = Comparisons(64, 8, (Words(count=60, pairs=True),), Bpe(vocab=257), held_out=0.3)
    return replace(tiny, data=data, objective=SimPO(), steps=4, evaluation=Evaluation(every=2))


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_run_reports_how_often_the_chosen_answer_is_the_better_one(preferring, do, tmp_path):
    ran = do(preferring, tmp_path / "run")
    records = [one for one in read_lines(ran.folder / "metrics.jsonl") if "eval_accuracy" in one]
    assert [one["step"] for one in records] == [2, 4]
    assert all(0 <= one["eval_accuracy"] <= 1 and "eval_bits_per_byte" not in one for one in records)
    for one in records:
        assert one["eval_margin"] == pytest.approx(one["eval_chosen"] - one["eval_rejected"], abs=1e-5)
        assert f", margin {one['eval_margin']:.4f}, rejected {one['eval_rejected']:.4f}, over" in "\n".join(ran.lines)
    assert all(0 <= accuracy <= 1 for _, accuracy, _ in ran.records("accuracy", "margin"))


@pytest.mark.full
def test_adapters_that_were_off_in_training_are_off_in_an_evaluation_of_the_run(preferring, do, few, tmp_path):
    stage = replace(preferring, steps=1, evaluation=None)
    train = replace(
        preferring,
        stages={"base": stage},
        init_from="stage:base",
        transforms=(LoRA(rank=4),),
        objective=DPO(),
        references={"reference": AdaptersOff()},
    )
    ran = do(train, tmp_path / "run")
    expected = [one["eval_loss"] for one in read_lines(ran.folder / "metrics.jsonl") if "eval_loss" in one][-1]
    with few(1):
        found = evaluate_run(ran.folder, None, None, silent)
        assert generate_text(ran.folder, "a", Sampling(tokens=2), silent).startswith("a")
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert abs(found.loss - np.log(2)) > 1e-6


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"objective": SimPO(pairs=2)}, ("Comparisons.packed is 8", "SimPO.pairs 2", "at least 8")),
        ({"objective": NextToken()}, ("NextToken", "answers", "Train.objective")),
    ],
)
def test_data_and_objective_are_compared_before_training(fields, said, preferring, few, caches):
    train = replace(preferring, **fields)

    def compare():
        prepared = train.data.prepare(silent)
        program(train).evaluator.check_arrays(prepared.arrays)
        prepared.check_fits(train.model, train.objective, train.seq)

    with few(1), pytest.raises(UserError) as error:
        compare()
    for part in said:
        assert part in str(error.value)
