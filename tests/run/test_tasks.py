"""A trained model on tasks of lm-eval's harness, in files of our own: against plain computations.

What calls the harness is `full`: only `--full` and `--slow` install the extra `eval`.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from reports import silent

from axon.errors import UserError
from axon.nn import Inputs
from axon.run import tasks
from axon.run.inspect import runtime_of
from axon.run.tasks import evaluate_tasks, sequence_positions, table
from axon.run.trained import open_trained
from axon.serve.offline import write
from axon.serve.request import Request, Sampling
from axon.train.evaluate import Evaluator
from axon.train.objective import NextToken
from models.bert import Bert
from models.gpt2 import GPT2

CHOICES = ["alpha beta", "zzz", "gamma delta epsilon"]
QUESTIONS = ["beta gamma", "iota kappa alpha"]
TEXT = "alpha beta gamma " * 8
PROMPT = "alpha beta"

HEAD = "task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: '{data}'}}\ntest_split: test\n"
FILES = {
    "choice": (
        "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_target: 0\ndoc_to_choice: choices\n"
        "metric_list: [{metric: acc}]\n",
        [{"question": question, "choices": CHOICES} for question in QUESTIONS],
    ),
    "rolling": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list: [{metric: bits_per_byte}]\n",
        [{"text": TEXT}],
    ),
    "until": (
        "output_type: generate_until\ndoc_to_text: text\ndoc_to_target: answer\n"
        "generation_kwargs: {until: ['STOP'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
        [{"text": PROMPT, "answer": "ANSWER"}],
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """write(**replaced): a folder with the three tasks and their texts, pieces of which are replaced."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def write(**replaced):
        for name, (text, documents) in FILES.items():
            data = tmp_path / f"{name}.jsonl"
            body = "".join(json.dumps(document) + "\n" for document in documents)
            for old, new in replaced.items():
                body, text = body.replace(old, json.dumps(new)[1:-1]), text.replace(old, new)
            data.write_text(body)
            (tmp_path / f"{name}.yaml").write_text(HEAD.format(name=name, data=data) + text)
        return tmp_path

    return write


@pytest.fixture
def opened(trained, few):
    """(runtime, parameters, tokenizer) of the run, by hand."""
    run = open_trained(trained.folder)
    with few(1):
        runtime = runtime_of(run.train, silent)
        yield runtime, run.restore(runtime, run.train.model, silent)[0], run.tokenizer.load()


def nats(opened, ids, first):
    """Of `ids` from place `first` on, as `axon eval` computes them."""
    runtime, parameters, _ = opened
    length = len(ids) - 1
    index = np.arange(length, dtype=np.int32)[None]
    batch = {"tokens": np.asarray([ids[:-1]], np.int32), "targets": np.asarray([ids[1:]], np.int32)}
    batch |= {"positions": index, "documents": 0 * index, "weights": (index >= first - 1).astype(np.float32)}
    evaluator = Evaluator(runtime, NextToken(), 1, length)
    return float(evaluator(parameters, evaluator.place(batch))["loss"][0])


@pytest.mark.full
def test_tasks_give_what_plain_computations_give(trained, folder, opened):
    _, parameters, tokenizer = opened
    asked = Request(tuple(tokenizer.prompt(PROMPT)), Sampling(12, temperature=0.0))
    text = next(write(opened[0], parameters, {}, tokenizer, [asked])).text
    at = len(text) // 2
    answer, stop = text[: text.index(text[at : at + 3])], text[at : at + 3]
    where = folder(STOP=stop, ANSWER=answer)
    found = evaluate_tasks(trained.folder, list(FILES), silent, folder=where)

    likeliest = []
    for question in QUESTIONS:
        context = tokenizer.prompt(question)
        both = [tokenizer.prompt(f"{question} {choice}") for choice in CHOICES]
        likeliest.append(int(np.argmin([nats(opened, ids, len(context)) for ids in both])))
    assert found["results"]["choice"]["acc,none"] == np.mean([place == 0 for place in likeliest])

    whole = nats(opened, [tokenizer.bos, *tokenizer.encode(TEXT)], 1)
    bits = whole / math.log(2) / len(TEXT.encode())
    assert found["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)

    assert found["results"]["until"]["exact_match,none"] == 1.0
    assert found["n-samples"]["choice"]["effective"] == 2
    json.dumps(found)


@pytest.mark.full
def test_tasks_of_an_encoder_decoder_give_what_plain_computations_give(answering, folder, few):
    with few(1):
        run = open_trained(answering)
        runtime, tokenizer = runtime_of(run.train, silent), run.tokenizer.load()
        parameters, variables = run.restore(runtime, run.train.model, silent)

        def nats(question, choice):
            """Of a choice, which the harness has begin with a space, as the answer to a question."""
            read, ids = np.asarray([tokenizer.prompt(question)]), tokenizer.encode(f" {choice}")
            written = np.asarray([[5, *ids[:-1]]])

            def logits(parameters):
                model = runtime.bind(parameters, variables)
                encoded, _ = model.encode(Inputs(read, 0 * read, 0 * read))
                return model.output.logits(
                    model.decode(Inputs(written, 0 * written, 0 * written), encoded, 0 * read)[0]
                )

            with runtime.tracing():
                likely = np.asarray(jax.nn.log_softmax(jax.jit(logits)(parameters)[0]))
            return -likely[np.arange(len(ids)), ids].sum()

        asked = Request(tuple(tokenizer.prompt(PROMPT)), Sampling(12, temperature=0.0))
        text = next(write(runtime, parameters, variables, tokenizer, [asked])).text
        found = evaluate_tasks(answering, ["choice", "until"], silent, folder=folder(ANSWER=text))
        likeliest = [int(np.argmin([nats(question, choice) for choice in CHOICES])) for question in QUESTIONS]
        assert found["results"]["choice"]["acc,none"] == np.mean([place == 0 for place in likeliest])
        assert found["results"]["until"]["exact_match,none"] == 1.0
        with pytest.raises(UserError, match=r"loglikelihood_rolling\), and an encoder–decoder has none"):
            evaluate_tasks(answering, ["rolling"], silent, folder=folder())


def test_every_metric_is_a_line():
    results = {"one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.25, "exact_match,strict": 1.0}}
    assert table(results) == ["one: acc 0.5000 ± 0.2500", "one: exact_match (strict) 1.0000"]


def test_without_the_harness_one_error_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--tasks needs .* pip install 'axon-jax\[eval\]'"):
        evaluate_tasks(tmp_path, ["choice"], silent)


@pytest.mark.full
def test_a_model_that_writes_no_texts_is_refused(monkeypatch, folder):
    bert = SimpleNamespace(train=SimpleNamespace(model=Bert(64, 32, 1, 4, 48, 16)))
    monkeypatch.setattr(tasks, "open_trained", lambda path: bert)
    with pytest.raises(UserError, match="--tasks: hf:bert is a Bert; expected a model that writes texts"):
        evaluate_tasks(Path("hf:bert"), ["choice"], silent, folder=folder())


def test_sequences_are_no_longer_than_what_the_model_takes(trained, rng):
    run, rotary = open_trained(trained.folder), trained.train.model.build()
    seq = run.train.seq
    wanted = int(rng.integers(2, seq))
    assert [sequence_positions(one, run, rotary) for one in (None, wanted, seq)] == [seq, wanted, seq]
    with pytest.raises(UserError, match=f"--max-length is {seq + 1}, and the model was trained on sequences of {seq} "):
        sequence_positions(seq + 1, run, rotary)
    hub = SimpleNamespace(train=run.train, trained_length=None)
    assert sequence_positions(10 * seq, hub, rotary) == 10 * seq
    learned = GPT2(64, 32, 1, 4, 48, positions=wanted).build()
    assert sequence_positions(None, hub, learned) == wanted
    with pytest.raises(UserError, match=f"--max-length is {seq}, and the model has {wanted} positions: lower it"):
        sequence_positions(seq, hub, learned)


@pytest.mark.full
def test_longer_sequences_than_the_run_was_trained_on_are_refused(trained, folder):
    with pytest.raises(UserError, match="--max-length is 33"):
        evaluate_tasks(trained.folder, ["choice"], silent, folder=folder(), max_length=33)


@pytest.mark.full
def test_a_task_that_the_harness_cannot_prepare_is_an_error(folder, trained):
    where = folder(**{"doc_to_text: question": "doc_to_text: '{{nothing}}'"})
    with pytest.raises(UserError, match="lm-eval cannot prepare choice: UndefinedError: 'nothing' is undefined"):
        evaluate_tasks(trained.folder, ["choice"], silent, folder=where)


@pytest.mark.full
def test_an_unknown_task_or_folder_is_an_error(folder, trained, tmp_path):
    with pytest.raises(
        UserError, match=r"there is no task 'chioce'\. Did you mean 'choice'.* has choice, rolling, until\."
    ):
        evaluate_tasks(trained.folder, ["chioce"], silent, folder=folder())
    with pytest.raises(UserError, match="nothing is not a folder"):
        evaluate_tasks(trained.folder, ["choice"], silent, folder=tmp_path / "nothing")
