"""Chats: recognised by their columns, written by the template, packed, and learned from; answers are evaluated."""

import hashlib
import json
from dataclasses import replace
from itertools import groupby

import jax
import numpy as np
import pytest

from axon.config import dump, load
from axon.data import Bpe, FeedContext, JsonLines, Parquet, TokenizerFile
from axon.errors import UserError
from axon.observe.lines import read_lines
from axon.run import Evaluation, program
from axon.run.answers import answers_of
from axon.serve.offline import write
from axon.serve.request import Request, Sampling
from axon.train.evaluate import Evaluator
from axon.train.objective import NextToken
from axon.tune import Chats, Comparisons, Words
from axon.tune.formats import CHATS, Conversation, read_example
from axon.tune.packing import Document, Example, batch_of, packed
from axon.tune.questions import normalised
from axon.tune.split import Split
from axon.tune.turns import Names

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
SYSTEM = {"role": "system", "content": "be brief"}
SHAPES = {
    "openai": {"messages": [SYSTEM, USER, ANSWER]},
    "sharegpt": {
        "system": "be brief",
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
    },
    "texts": {"system": "be brief", "prompt": "hi", "completion": "ho"},
    "messages": {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
    "alpaca": {"system": "be brief", "instruction": "hi", "input": "", "output": "ho"},
}


def silent(line):
    pass


@pytest.mark.parametrize("name", SHAPES)
def test_one_conversation_has_many_shapes(name):
    assert read_example(SHAPES[name], "here", CHATS) == (Conversation((SYSTEM, USER, ANSWER)),)
    renamed = {f"their_{column}": value for column, value in SHAPES[name].items()}
    names = {column: f"their_{column}" for column in SHAPES[name]}
    assert read_example(renamed, "here", CHATS, Names(names)) == (Conversation((SYSTEM, USER, ANSWER)),)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"question": "a", "answer": "b"},
            ("file:3", "'question', 'answer'", "messages; ", "{'prompt': 'question', 'completion': 'answer'}"),
        ),
        ({"messages": "text"}, ("file:3", "'messages'", "'text'", '"role": "user"')),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, ("file:3", "'conversations'", "nobody", "human")),
        ({"prompt": 3, "completion": "x"}, ("file:3", "'prompt'", "3", "text")),
        ({"messages": [USER], "tools": "none"}, ("file:3", "'tools'", "list")),
    ],
)
def test_columns_that_are_not_understood_are_named_with_the_place_and_the_remedy(record, said):
    with pytest.raises(UserError) as error:
        read_example(record, "file:3", CHATS)
    for part in said:
        assert part in str(error.value)


def chats(path, records, **fields):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    defaults = {"seq": 48, "batch": 2, "tokenizer": Bpe(vocab=257), "held_out": 0.0, "threads": 0}
    return Chats(**{**defaults, "sources": (JsonLines(str(path)),), **fields})


def pairs(count, rng, length=6):
    letters = [*"abcdefgh"]
    texts = ["".join(rng.choice(letters, size=rng.integers(1, length))) for _ in range(2 * count)]
    return [{"prompt": one, "completion": two} for one, two in zip(texts[::2], texts[1::2], strict=True)]


def test_a_batch_has_each_example_once_and_learns_the_answers_alone(tmp_path, rng, caches):
    records = pairs(9, rng)
    prepared = chats(tmp_path / "x.jsonl", records, batch=16, packed=2).prepare(silent)
    tokenizer = prepared.tokenizer
    rows = prepared.splits["train"].batch(np.arange(len(prepared.splits["train"])))
    found = []
    for row in range(len(rows["tokens"])):
        for number in range(rows["documents"][row].max() + 1):
            own = rows["documents"][row] == number
            np.testing.assert_array_equal(rows["positions"][row][own], np.arange(own.sum()))
            learned = own & (rows["weights"][row] == 1)
            found.append((tokenizer.decode(rows["tokens"][row][own]), tokenizer.decode(rows["targets"][row][learned])))
        assert not rows["weights"][row][rows["documents"][row] < 0].any()
    begin = "<|endoftext|>user: "
    assert sorted(found) == sorted(
        (f"{begin}{one['prompt']}\nassistant: {one['completion']}\n", f" {one['completion']}\n<|endoftext|>")
        for one in records
    )


def test_messages_count_by_their_weights_in_chats_alone(tmp_path, caches):
    talk = [{"role": role, "content": "b"} for role in ("user", "assistant", "user", "assistant", "user", "assistant")]
    for message, weight in zip(talk[1::2], (0.5, 0, 2), strict=True):
        message["weight"] = weight
    prepared = chats(tmp_path / "x.jsonl", [{"messages": talk}], seq=96).prepare(silent)
    batch = prepared.splits["train"].batch(np.arange(1))
    found = [(weight, len([*run])) for weight, run in groupby(batch["weights"][0]) if weight]
    assert [weight for weight, _ in found] == [0.5, 2]
    learned = [prepared.tokenizer.decode(batch["targets"][0][batch["weights"][0] == weight]) for weight in (0.5, 2)]
    assert learned == [" b\n", " b\n<|endoftext|>"]
    counted = batch["weights"] * prepared.tokenizer.byte_lengths[batch["targets"]]
    np.testing.assert_array_equal(prepared.text_bytes(batch), counted)
    pair = {"prompt": talk[:1], "chosen": talk[1:2], "rejected": [{"role": "assistant", "content": "c"}]}
    (tmp_path / "y.jsonl").write_text(json.dumps(pair) + "\n")
    compared = Comparisons(seq=48, batch=2, tokenizer=Bpe(vocab=257), sources=(JsonLines(str(tmp_path / "y.jsonl")),))
    with pytest.raises(UserError, match=r"y\.jsonl:1: a message has a weight other than 0 and 1, .*Comparisons"):
        compared.prepare(silent)


def test_no_example_is_divided_lost_or_repeated_by_packing(rng):
    sizes = rng.integers(2, 40, size=300)
    examples = [Example((Document(np.zeros(size, np.int32), np.ones(size, bool)),), "") for size in sizes]
    for most in (1, 3, 99):
        rows = packed(examples, 40, most)
        assert sorted(number for row in rows for number in row) == [*range(300)]
        assert all(len(row) <= most and sum(sizes[one] - 1 for one in row) <= 40 for row in rows)


@pytest.mark.parametrize("column", ["rules", "ruels"])
def test_a_column_that_is_named_and_no_record_has_is_said(column, tmp_path, caches):
    records, lines = [{"prompt": "a", "completion": "b", "rules": "c"}, {"prompt": "d", "completion": "e"}], []
    chats(tmp_path / "x.jsonl", records, columns={"system": column}).prepare(lines.append)
    said = [line for line in lines if "no record has: ruels" in line]
    assert len(said) == (column == "ruels")


@pytest.mark.parametrize(("long", "kept"), [("drop", 1), ("cut", 2)])
def test_long_examples_are_dropped_or_cut_and_named_and_a_cut_answer_learns_no_end(long, kept, tmp_path, caches):
    records = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b" * 99},
        {"prompt": "c" * 99, "completion": "b"},
    ]
    lines = []
    prepared = chats(tmp_path / "x.jsonl", records, long=long).prepare(lines.append)
    own = prepared.splits["train"].examples
    assert len(own) == kept
    (said,) = [line for line in lines if "are dropped:" in line]
    assert f"{3 - kept} examples" in said
    assert "x.jsonl:3" in said
    assert ("x.jsonl:2" in said) == (long == "drop")
    if long == "cut":
        assert any("1 examples" in line and "are cut:" in line and "x.jsonl:2" in line for line in lines)
        (document,) = own[1].documents
        assert len(document.ids) == 49
        assert prepared.tokenizer.bos not in document.ids[document.learned]


def test_three_are_named_and_each_is_recorded(tmp_path, rng, caches):
    long = [*map(bool, rng.integers(0, 2, 20)), False, *[True] * 4]
    records = [{"prompt": f"{number}", "completion": "b" * (99 if one else 1)} for number, one in enumerate(long)]
    lines, places = [], [f"x.jsonl:{number + 1}" for number, one in enumerate(long) if one]
    prepared = chats(tmp_path / "x.jsonl", records).prepare(lines.append)
    (said,) = [line for line in lines if "are dropped:" in line]
    assert said.startswith(f"{len(places)} examples")
    assert [place in f"{said.replace(', …', '')}," for place in (f"{one}," for one in places)] == [
        number < 3 for number in range(len(places))
    ]
    ((what, each),) = prepared.remarked.items()
    assert what in said
    assert [one.rpartition("/")[2] for one in each] == places


@pytest.mark.parametrize(("duplicates", "left"), [("drop", 3), ("keep", 6)])
def test_examples_that_are_there_already_are_counted_named_and_dropped_where_asked(duplicates, left, tmp_path, caches):
    one, other = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}
    records, lines = [one, other, one, {"prompt": "b", "completion": "b"}, one, other], []
    prepared = chats(tmp_path / "x.jsonl", records, duplicates=duplicates).prepare(lines.append)
    assert len(prepared.splits["train"].examples) == left
    (said,) = [line for line in lines if "already" in line]
    assert said.startswith("3 examples")
    assert all(f"x.jsonl:{number}" in said for number in (3, 5, 6))


@pytest.mark.full
@pytest.mark.draws(1)
def test_sources_are_drawn_from_by_their_weights_and_share_no_sequence(tmp_path, rng, caches):
    paths = [tmp_path / name for name in ("small.jsonl", "large.jsonl")]
    for path, count in zip(paths, (7, 60), strict=True):
        chats(path, pairs(count, rng))
    sources = tuple(JsonLines(str(path)) for path in paths)
    mixed = chats(tmp_path / "x.jsonl", [], sources=sources, weights=(3, 1), batch=50)
    prepared = mixed.prepare(silent)
    places = [row["examples"] for step in range(20) for row in prepared.documents(5, step)]
    of_small = [{"small.jsonl" in place for place in row} for row in places]
    assert all(len(one) == 1 for one in of_small)
    assert np.mean([one == {True} for one in of_small]) == pytest.approx(0.75, abs=2e-3)
    both = {place for row in places for place in row}
    assert both == {example.where for example in prepared.splits["train"].examples}


def test_questions_of_the_held_out_split_are_not_trained_on(tmp_path, rng, caches):
    records = pairs(200, rng, length=3)
    prepared = chats(tmp_path / "x.jsonl", records, held_out=0.3).prepare(silent)
    asked = {
        name: {tuple(one.documents[0].ids[: int(np.argmax(one.documents[0].learned))]) for one in split.examples}
        for name, split in prepared.splits.items()
    }
    assert not asked["train"] & asked["held_out"]
    assert len(asked["train"]) + len(asked["held_out"]) == len({record["prompt"] for record in records})


def test_a_question_in_another_writing_is_in_the_same_split(tmp_path, rng, caches):
    """Another case, more white space and compatible forms of letters; such are counted, and named."""
    asked = [f"word {number}" for number in rng.permutation(1000)[:40]]
    wide = ["".join(chr(ord(sign) + 0xFEE0) if sign > " " else "\t " for sign in text) for text in asked[20:]]
    prompts = [*asked, *map(str.upper, asked[:20]), *wide]
    records, lines = [{"prompt": text, "completion": str(at)} for at, text in enumerate(prompts)], []
    prepared = chats(tmp_path / "x.jsonl", records, held_out=0.4, seq=128).prepare(lines.append)
    train, held_out = (
        {normalised(one.record["prompt"]) for one in prepared.splits[name].examples} for name in ("train", "held_out")
    )
    assert held_out < {*asked}
    assert train == {*asked} - held_out
    (told,) = [line for line in lines if "have the question of others but for case" in line]
    assert "40 examples" in told
    assert "x.jsonl:41, " in told


def test_batches_follow_from_seed_and_number_and_each_process_has_its_sequences(tmp_path, rng, caches):
    prepared = chats(tmp_path / "x.jsonl", pairs(40, rng), batch=4).prepare(silent)

    def drawn(count, **context):
        with prepared.feed(FeedContext(3, None, **context)) as feed:
            return [feed.draw(None) for _ in range(count)]

    whole = drawn(4)
    for found, expected in zip(drawn(2, start=1, left_out=(2,)), (whole[1], whole[3]), strict=True):
        np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    (part,) = drawn(1, sequences=np.array([1, 3]))
    np.testing.assert_array_equal(part["weights"], whole[0]["weights"][[1, 3]])


def test_parquet_files_have_the_same_examples(tmp_path, rng, caches):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [SHAPES["openai"], {"messages": [USER, ANSWER]}]
    lines = chats(tmp_path / "x.jsonl", records)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
    other = replace(lines, sources=(Parquet(str(tmp_path / "x.parquet")),)).prepare(silent)
    assert lines.prepare(silent).splits["train"].digest() == other.splits["train"].digest()


def test_a_digest_is_of_what_stands_beside_the_ids_too(rng):
    """As the types of tokens; of texts without any it is that of runs before there were such."""
    ids, learned = rng.integers(1, 320, 7).astype(np.int32), rng.random(7) < 0.5
    texts = [Document(ids, learned, more) for more in ({}, *({"types": ids % n} for n in (2, 3)))]
    found = [Split(None, (Example((text,), ""),)).digest() for text in texts]
    assert len({*found}) == 3
    plain = ids.tobytes() + b"/" + (learned > 0).tobytes() + b"/"
    assert found[0] == hashlib.blake2b(plain, digest_size=8).hexdigest()


def test_the_loss_does_not_depend_on_packing(tiny, few, begun, rng):
    sizes = rng.integers(3, 12, size=6)
    examples = [
        Example((Document(rng.integers(1, 320, size).astype(np.int32), rng.random(size) < 0.5),), "") for size in sizes
    ]
    with few(1):
        made = program(tiny)
    state, sums = begun(made, rng), {}
    for name, rows in {"alone": [[one] for one in examples], "packed": [examples[:3], examples[3:]]}.items():
        rows += [[]] * (8 - len(rows))
        evaluator = Evaluator(made.runtime, NextToken(), 8, 32)
        batch = evaluator.place(batch_of(rows, 32, "documents"))
        sums[name] = jax.device_get(evaluator(state.parameters, batch, state.variables))["loss"]
    np.testing.assert_allclose(sums["packed"], sums["alone"], rtol=1e-5)


@pytest.fixture(scope="module")
def tuned(tiny, do, tmp_path_factory):
    """A run on a few words that are to be written backwards."""
    data = Chats(48, 8, (Words(count=40, letters=2, shortest=2, longest=3),), Bpe(vocab=257), held_out=0.2)
    train = replace(tiny, data=data, steps=12, evaluation=Evaluation(every=6, answers=6))
    return do(train, tmp_path_factory.mktemp("tuned") / "run")


@pytest.mark.full
def test_the_runs_folder_says_where_each_example_is_that_was_dropped_or_repeated(tuned):
    expected = tuned.train.data.prepare(silent).remarked
    assert any("already" in what for what in expected)
    assert [(one["what"], one["where"]) for one in read_lines(tuned.folder / "remarked.jsonl")] == [
        (what, where) for what, places in expected.items() for where in places
    ]
    assert f"where each of these examples is: {tuned.folder / 'remarked.jsonl'}" in tuned.lines


@pytest.mark.full
def test_answers_are_right_where_the_greedy_one_is_the_answer(tuned, few):
    records = [one for one in read_lines(tuned.folder / "metrics.jsonl") if "eval_exact" in one]
    assert [one["step"] for one in records] == [6, 12]
    with few(1):
        made = program(tuned.train)
        prepared = tuned.train.data.prepare(silent)
        state, answers = made.init(), answers_of(tuned.train, prepared, made)
        questions = prepared.questions(6)
        asked = [Request(one.prompt, Sampling(len(one.answer), temperature=0)) for one in questions]
        own = [one.ids for one in write(made.runtime, state.parameters, state.variables, prepared.tokenizer, asked)]
        answers._questions = [
            replace(one, answer=ids if number % 3 else (0,))
            for number, (one, ids) in enumerate(zip(questions, own, strict=True))
        ]
        found = answers(state)
        assert found.metrics() == {"exact": sum(number % 3 > 0 for number in range(len(own))) / len(own)}
        assert [one["scores"] for one in found.shown()] == [
            {"exact": float(number % 3 > 0)} for number in range(len(own))
        ]
    for question in questions:
        texts = prepared.tokenizer.decode(question.prompt), prepared.tokenizer.decode(question.answer)
        word = texts[0].removeprefix("<|endoftext|>user: ").removesuffix("\nassistant:")
        assert texts[1] == f" {word[::-1]}\n<|endoftext|>"


def test_its_file_is_the_same_tree(tuned, tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(dump(tuned.train))
    assert load(file).tree == tuned.train


@pytest.mark.parametrize(
    ("records", "fields", "said"),
    [
        ([{"messages": [USER]}], {}, ("x.jsonl:1", "nothing is learned", "assistant")),
        (
            [{"messages": [{"role": "robot", "content": "x"}, ANSWER]}],
            {},
            ("x.jsonl:1", "'robot'", "roles", "{'robot': 'user'}"),
        ),
        ([SHAPES["texts"]], {"seq": 4}, ("Chats.sources", "train", "Chats.seq 4")),
        ([SHAPES["texts"]], {"columns": {"question": "q"}}, ("Chats.columns", "'question'", "messages")),
        ([SHAPES["texts"]], {"roles": {"Bot": "asistant"}}, ("Chats.roles", "'Bot'", "Did you mean 'assistant'")),
        ([SHAPES["texts"]], {"sources": ()}, ("Chats.sources", "JsonLines")),
        ([SHAPES["texts"]], {"weights": (1, 2)}, ("Chats.weights", "2 numbers", "1 sources")),
        ([SHAPES["texts"]], {"weights": (0.0,)}, ("Chats.weights", "positive")),
    ],
)
def test_mistakes_are_named_by_place_and_remedy(records, fields, said, tmp_path, caches):
    with pytest.raises(UserError) as error:
        chats(tmp_path / "x.jsonl", records, **fields).prepare(silent)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('only ' + messages[0].role) }}", "x.jsonl:1: .*only system"),
        ("{{ messages[0].content.nothing.more }}", "x.jsonl:1: .*template"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            r"x.jsonl:1: messages\[0\]: .*leaves out",
        ),
    ],
)
def test_what_a_template_refuses_or_leaves_out_is_named_by_its_record(template, said, tmp_path, caches):
    records = [SHAPES["texts"]]
    built = chats(tmp_path / "x.jsonl", records)
    built.prepare(silent).tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=said):
        replace(built, tokenizer=TokenizerFile(str(tmp_path / "tokenizer.json"))).prepare(silent)


def test_answers_are_asked_of_data_that_have_questions(tiny, few):
    train = replace(tiny, evaluation=Evaluation(answers=3))
    with few(1), pytest.raises(UserError, match=r"Evaluation.answers is 3.*Chats"):
        answers_of(train, tiny.data.prepare(silent), program(train))


def test_an_evaluation_needs_held_out_chats(tiny):
    data = Chats(48, 8, (Words(count=40),), Bpe(vocab=257), held_out=0.0)
    with pytest.raises(UserError, match=r"Train.evaluation needs Chats.held_out above 0"):
        replace(tiny, data=data)
