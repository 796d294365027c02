"""A file of a teacher's likeliest next tokens: the same distillation as beside the teacher, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from reports import silent

from axon.data import JsonLines, TokenizerFile
from axon.errors import UserError
from axon.run import Reference
from axon.run.teach import write_taught
from axon.train.distillation import Distillation, TopDistillation
from axon.tune import Chats, TaughtChats, Words


@pytest.fixture(scope="module")
def chats(trained):
    """A run of half the width, on chats with the trained run's tokens."""
    tokenizer = TokenizerFile(str(trained.folder / "tokenizer.json"))
    data = Chats(seq=64, batch=4, sources=(Words(count=24),), tokenizer=tokenizer, held_out=0.0)
    model = replace(trained.train.model, embed=trained.train.model.embed // 2)
    return replace(trained.train, model=model, data=data, steps=2, sample=None, evaluation=None)


@pytest.fixture(scope="module")
def files(chats, trained, few, tmp_path_factory):
    """By `top`, what the trained run says of the chats; all of its vocabulary, and less of it."""
    folder, vocab = tmp_path_factory.mktemp("taught"), trained.train.model.vocab
    found = {top: folder / f"{top}.jsonl" for top in (vocab, 4)}
    with few(1):
        for top, file in found.items():
            write_taught(chats, str(trained.folder), top, file, silent)
    return found


def of(chats, file, top):
    fields = {name: getattr(chats.data, name) for name in ("seq", "batch", "tokenizer", "held_out")}
    data = TaughtChats(**fields, sources=(JsonLines(str(file)),), top=top)
    return replace(chats, data=data, objective=TopDistillation(divergence="jensen_shannon", top=top))


@pytest.mark.full
def test_it_distils_as_beside_the_teacher(chats, trained, files, do, tmp_path):
    reference = {"teacher": Reference(trained.train.model, str(trained.folder))}
    objective = Distillation(divergence="jensen_shannon")
    beside = do(replace(chats, objective=objective, references=reference), tmp_path / "beside")
    whole, some = (do(of(chats, file, top), tmp_path / f"{top}") for top, file in files.items())
    names = "divergence", "loss", "grad_norm"
    np.testing.assert_allclose(whole.records(*names), beside.records(*names), rtol=2e-4)
    (_, bound, *_), (_, exact, *_) = some.records(*names)[0], beside.records(*names)[0]
    assert 0 < bound < exact


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_file_for_other_tokens_is_refused_by_place(chats, files, tmp_path):
    record = json.loads(files[4].read_text().splitlines()[0])
    file, train = tmp_path / "one.jsonl", of(chats, tmp_path / "one.jsonl", 4)

    def refused(message, **columns):
        file.write_text(json.dumps(record | columns) + "\n")
        with pytest.raises(UserError, match=message):
            train.data.prepare(silent)

    ids, logprobs = record["teacher_ids"], record["teacher_logprobs"]
    refused(r"one\.jsonl:1: column 'teacher_ids' has \d+ rows, and \d+ tokens are learned", teacher_ids=ids[1:])
    refused(r"row of 3, and TaughtChats\.top is 4", teacher_ids=[ids[0][:3], *ids[1:]])
    refused(r"has \d+ twice", teacher_ids=[[7] * 4, *ids[1:]])
    refused(r"come to .*not logits", teacher_logprobs=[[3.0, 1.0, 0.0, -1.0], *logprobs[1:]])
    refused(r"has the id -1", teacher_ids=[[1, 2, 3, -1], *ids[1:]])
    refused(r"expected a list of lists", teacher_logprobs=logprobs[0])
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(UserError, match=r"teacher_ids and teacher_logprobs"):
        train.data.prepare(silent)
    file.write_text(json.dumps(record | {"teacher_ids": [[1, 2, 3, 99999], *ids[1:]]}) + "\n")
    with pytest.raises(UserError, match=r"one\.jsonl:1.*99999.*another vocabulary"):
        train.data.prepare(silent).check_fits(train.model, train.objective, 64)
    with pytest.raises(UserError, match=r"TaughtChats\.top is 4, and TopDistillation\.top 5"):
        train.data.check_objective(TopDistillation(top=5))
