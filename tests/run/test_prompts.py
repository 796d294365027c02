"""Many prompts of a file: read, answered in their order, and written a line each."""

import json
from dataclasses import replace

import pytest
from reports import silent

from axon.errors import UserError
from axon.run import prompts as module
from axon.run.inspect import generate_text
from axon.run.prompts import generate_texts, read_prompts
from axon.serve import Answer, Finish, Sampling


@pytest.fixture
def file(tmp_path):
    """file(name, *lines): its path."""

    def write(name, *lines):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return write


@pytest.mark.full
def test_each_prompt_has_the_text_that_it_has_alone_in_the_order_of_the_file(trained, few, file, tmp_path, rng, capsys):
    words = rng.permutation(["alpha", "beta gamma", "", "delta é", "epsilon"]).tolist()
    asked = [{"prompt": word, "tokens": int(rng.integers(1, 30))} for word in words]
    asked[0] |= {"temperature": 0, "repetition_penalty": 1.5, "stop": "a", "logprobs": 1}
    lines, sampling = file("in.jsonl", *map(json.dumps, asked)), Sampling(4, 0.9, seed=7)
    with few(1):
        generate_texts(trained.folder, lines, sampling, tmp_path / "out.jsonl", silent)
        found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        alone = []
        for sample in read_prompts(lines, sampling).values():
            alone.append(generate_text(trained.folder, sample.prompt, sample.sampling, silent))
        generate_texts(trained.folder, file("in.txt", *words), sampling, None, silent)
    assert [word + one["text"] for word, one in zip(words, found, strict=True)] == alone
    for one, line in zip(found, asked, strict=True):
        assert one["tokens"] == len(one["ids"]) <= line["tokens"]
        assert one["finish"] == "stop" or one["tokens"] == line["tokens"]
        assert ("logprobs" in one) == ("logprobs" in line)
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["tokens"] <= 4 for line in printed] == [True] * 5


def test_a_line_may_have_every_field_of_sampling_and_has_the_options_in_place_of_others(file):
    given = {"tokens": 3, "logit_bias": {"7": 2}, "stop": ["a", "b"], "stop_ids": [5], "top_p": 1, "min_p": None}
    lines = file("in.jsonl", json.dumps({"prompt": "x", **given}), "", '{"prompt": "y", "stop": "c"}')
    first, second = read_prompts(lines, Sampling(9, top_k=3, min_p=0.5)).items()
    wanted = Sampling(3, top_k=3, top_p=1.0, logit_bias={7: 2.0}, stop=("a", "b"), stop_ids=(5,))
    assert (first[0], first[1].prompt, first[1].sampling) == (f"{lines}:1", "x", wanted)
    rest = Sampling(9, top_k=3, min_p=0.5, stop=("c",)).of_choice(1)
    assert (second[0], second[1].sampling) == (f"{lines}:3", rest)


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_equal_lines_have_noise_of_their_own_and_the_same_again(name, file):
    line = "once" if name == "in.txt" else '{"prompt": "once"}'
    first, again, other = (
        [one.sampling.seed for one in read_prompts(file(name, *[line] * 4), Sampling(seed=seed)).values()]
        for seed in (7, 7, 8)
    )
    assert first == again
    assert len({*first, *other}) == 8
    assert first[0] == 7, "the first line is drawn as the prompt alone"


def test_a_line_with_a_seed_is_drawn_by_it_wherever_it_stands(file):
    lines = file("in.jsonl", '{"prompt": "x"}', '{"prompt": "x", "seed": 3}')
    assert list(read_prompts(lines, Sampling()).values())[1].sampling == Sampling(seed=3)


def test_each_line_of_a_text_is_a_prompt_an_empty_one_too(file):
    found = read_prompts(file("in.TXT", " one ", "", "two\r"), Sampling())
    assert [sample.prompt for sample in found.values()] == [" one ", "", "two"]


WRONG = {
    "not json": "not valid JSON",
    "[1]": "expected an object with a text as prompt",
    '{"text": "x"}': "expected an object with a text as prompt",
    '{"prompt": "x", "tokns": 3}': "unknown field 'tokns'. Did you mean 'tokens'?",
    '{"prompt": "x", "tokens": "3"}': "tokens: expected int, got '3'.",
    '{"prompt": "x", "tokens": 0}': "Sampling.tokens is 0; must be",
    '{"prompt": "x", "logit_bias": {"y": 1}}': "logit_bias: expected int, got 'y'",
    '{"prompt": "x", "stop": [1]}': "stop[0]: expected str, got 1",
    '{"prompt": "\\ud800"}': "must be valid UTF-8",
}


def test_all_lines_that_are_wrong_are_named_at_once(file):
    lines = file("in.jsonl", '{"prompt": "good"}', *WRONG)
    with pytest.raises(UserError) as error:
        read_prompts(lines, Sampling())
    heading, *said = str(error.value).split("\n  ")
    assert heading == f"{len(WRONG)} lines cannot be answered:"
    for number, (one, message) in enumerate(zip(said, WRONG.values(), strict=True), 2):
        assert one.startswith(f"{lines}:{number}: ")
        assert message in one
    with pytest.raises(UserError, match=r"and 90 more$"):
        read_prompts(file("many.jsonl", *["{}"] * 100), Sampling())
    (file("in.txt")).write_bytes(b"good\n\xff\n")
    with pytest.raises(UserError, match=r"in.txt:2: not UTF-8 text \(byte 0xff at 0\)"):
        read_prompts(file("no.txt").with_name("in.txt"), Sampling())


def test_what_cannot_be_read_or_written_is_said_before_the_model_is_opened(file, tmp_path):
    nowhere, lines = tmp_path / "nothing", file("in.txt", "x")
    with pytest.raises(UserError, match=r"expected a \.txt file of a prompt a line, or a \.jsonl file"):
        generate_texts(nowhere, file("in.csv", "x"), Sampling(), None, silent)
    with pytest.raises(UserError, match="There is no file or folder"):
        generate_texts(nowhere, tmp_path / "no.txt", Sampling(), None, silent)
    with pytest.raises(UserError, match=r"empty\.txt has no prompts"):
        generate_texts(nowhere, file("empty.txt"), Sampling(), None, silent)
    with pytest.raises(UserError, match=r"in\.txt is there already; give another"):
        generate_texts(nowhere, lines, Sampling(), lines, silent)
    with pytest.raises(UserError, match="there is no folder"):
        generate_texts(nowhere, lines, Sampling(), None, silent)


def test_a_line_that_the_model_cannot_answer_is_named_before_anything_is_written(trained, few, file, tmp_path):
    lines = file("in.jsonl", '{"prompt": "x"}', '{"prompt": "x", "logit_bias": {"320": 1}}')
    with few(1), pytest.raises(UserError, match=r"in\.jsonl:2: Sampling\.logit_bias has the id 320"):
        generate_texts(trained.folder, lines, Sampling(), tmp_path / "out.jsonl", silent)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_interrupt_leaves_the_lines_that_were_known_and_a_failure_is_told_after_all(
    trained, few, file, tmp_path, monkeypatch
):
    lines, good = file("in.txt", "x", "y"), Answer((1, 2), "é\n", Finish.LENGTH)
    said: list[str] = []

    def interrupted(*_):
        yield good
        raise KeyboardInterrupt

    with few(1):
        monkeypatch.setattr(module, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate_texts(trained.folder, lines, Sampling(), tmp_path / "cut.jsonl", said.append)
        told = '{"text": "é\\n", "tokens": 2, "finish": "length", "ids": [1, 2]}\n'
        assert not (tmp_path / "cut.jsonl").exists()
        assert said[-1] == f"the texts until then are in {tmp_path / 'cut.jsonl.part'}"
        assert (tmp_path / "cut.jsonl.part").read_text() == told
        failed = replace(good, finish=Finish.FAILED, error="no numbers")
        monkeypatch.setattr(module, "write", lambda *_: iter([failed, good]))
        with pytest.raises(UserError, match="1 of 2 texts failed: see `error` in their lines"):
            generate_texts(trained.folder, lines, Sampling(), tmp_path / "out.jsonl", silent)
    first, second = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(first)["error"] == "no numbers"
    assert second == told
