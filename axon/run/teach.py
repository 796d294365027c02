"""Writing a teacher's distributions beside the chats of a configuration, for `TaughtChats`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from axon.disk import writing
from axon.errors import UserError
from axon.model_config import vocab_of
from axon.run.inspect import restored
from axon.run.trained import open_trained
from axon.run.tree import Train
from axon.serve.teacher_forcing import Continuation
from axon.serve.top_logprobs import TopLogprobs
from axon.tune.chats import Chats
from axon.tune.taught_chats import taught

AT_ONCE = 256
"""Examples that are scored before they are written."""


def write_taught(train: Train, teacher: str, top: int, out: Path, report: Callable[[str], None]) -> None:
    """Write the records of `train.data`, JSON lines, each with the `top` most likely ids of the model `teacher`, a run
    or `hf:DIR_OR_NAME`, for each token that is learned of it.

    Raises `UserError` for other data than `Chats`, a teacher of other tokens, and a file that is there already.
    """
    if type(train.data) is not Chats:
        raise UserError(f"--teacher: Train.data is a {type(train.data).__name__}; expected chats, as @Chats()")
    if out.exists():
        raise UserError(f"--out: {out} is there already: give another name, or remove it")
    prepared = replace(train.data, held_out=0.0, long="drop", weights=None).prepare(report)
    trained = open_trained(teacher)
    trained.check_same_tokens(prepared.tokenizer.to_json())
    if top > (vocab := vocab_of(trained.train.model) or 0):
        raise UserError(f"--top is {top}, and {teacher} has {vocab} ids: give {vocab} at most")
    runtime, parameters, variables = restored(trained, report)
    score = TopLogprobs(runtime, train.data.seq, top)
    examples = prepared.splits["train"].examples
    partial = out.with_name(f"{out.name}.partial")
    with writing(out), partial.open("w", encoding="utf-8") as file:
        for start in range(0, len(examples), AT_ONCE):
            part = examples[start : start + AT_ONCE]
            wanted = [Continuation(ids[:1], ids[1:]) for ids in (one.documents[0].ids.tolist() for one in part)]
            found = {place: rows for place, *rows in score(parameters, variables, wanted)}
            for place, example in enumerate(part):
                learned = example.documents[0].learned[1:]
                ids, logprobs = (rows[learned] for rows in found[place])
                file.write(json.dumps(taught(example.record, ids, logprobs), ensure_ascii=False) + "\n")
        file.close()
        partial.replace(out)
    report(f"{len(examples):,} records with the {top} most likely next tokens of {teacher}: {out}")
