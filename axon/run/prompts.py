"""Many prompts of a file, and what a trained model makes of them."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from axon.config.types import Mismatch, fit
from axon.disk import check_new_file, free_name, named, reading, writing
from axon.errors import UserError, suggest
from axon.observe.lines import LinesFile
from axon.run.inspect import Report, restored
from axon.run.session import request_of
from axon.run.trained import open_trained
from axon.run.tree import Sample
from axon.serve.offline import Answer, write
from axon.serve.request import Request, Sampling
from axon.serve.text_model import check_request

A = TypeVar("A")
B = TypeVar("B")

FIELDS = get_type_hints(Sampling)
"""What a line may have besides `prompt`, and of which type."""

SHOWN = 10
"""Mistakes that are listed, at most."""


def generate_texts(
    path: str | Path,
    prompts: Path,
    sampling: Sampling,
    out: Path | None,
    report: Report,
    weights: str | None = None,
    adapter: str | None = None,
) -> None:
    """Write what follows each prompt of a file as JSON, a line each in their order, as soon as it is known.

    A line has `text`, its `ids`, how many `tokens` they are, and `finish`, why it ended; `logprobs` where they were
    asked for, and `error` where that is why.

    Args:
        path: the folder of a run, or `hf:DIR_OR_NAME`. prompts: of `read_prompts`.
        sampling: of prompts that do not say otherwise. out: a new file; None: standard output.
        weights, adapter: as of `axon.run.inspect.restored`.

    Raises `UserError` before anything runs for lines that cannot be answered, and after all for texts that failed.
    """
    samples = read_prompts(prompts, sampling)
    if out is not None:
        check_new_file(out := named(out, "--out"), "--out")
    trained = open_trained(path)
    tokenizer, module = trained.tokenizer.load(), trained.train.model.build()

    def asked(sample: Sample) -> Request:
        request = request_of(sample, tokenizer)
        check_request(module, request, tokenizer)
        return request

    requests = list(_of_each(samples, asked).values())
    runtime, values, variables = restored(trained, report, weights, adapter)
    failed = 0
    with _lines(out, report) as tell:
        for answer in write(runtime, values, variables, tokenizer, requests):
            tell(json.dumps(described(answer), ensure_ascii=False))
            failed += answer.error is not None
    if failed:
        raise UserError(f"{failed} of {len(requests)} texts failed: see `error` in their lines")


def read_prompts(path: Path, sampling: Sampling) -> dict[str, Sample]:
    """`FILE:LINE` → the prompt there: of a .txt file a line, of a .jsonl file an object with `prompt` and any fields of
    `Sampling`, the others as of `sampling`: but each line without a `seed` of its own has other noise, which follows
    from that of `sampling` and from its number.

    Raises `UserError` for a file of another kind or without prompts, and for lines that are wrong, which it names.
    """
    kinds: dict[str, Callable[[bytes, Sampling], Sample]] = {
        ".txt": lambda line, own: Sample(_decoded(line), own),
        ".jsonl": _parsed,
    }
    file = named(path, "--prompts")
    suffix = file.suffix.lower()
    if suffix not in kinds:
        raise UserError(f"--prompts is {path}; expected a .txt file of a prompt a line, or a .jsonl file of objects")
    with reading(file):
        lines = enumerate(file.read_bytes().splitlines(), 1)
    # An empty line of text is an empty prompt, of which each answer has its place.
    given = {f"{path}:{number}": line for number, line in lines if suffix == ".txt" or line.strip()}
    if not given:
        raise UserError(f"{path} has no prompts")
    numbered = {place: (line, sampling.of_choice(number)) for number, (place, line) in enumerate(given.items())}
    return _of_each(numbered, lambda one: kinds[suffix](*one))


def described(answer: Answer) -> dict[str, Any]:
    """An answer as JSON has it."""
    found: dict[str, Any] = {"text": answer.text, "tokens": len(answer.ids), "finish": answer.finish.value}
    found["ids"] = list(answer.ids)
    if answer.logprobs:
        found["logprobs"] = [asdict(one) for one in answer.logprobs]
    return found | ({} if answer.error is None else {"error": answer.error})


def _of_each(given: Mapping[str, A], make: Callable[[A], B]) -> dict[str, B]:
    """What is made of each. Raises a `UserError` that names the places of all of which nothing can be made."""
    made, wrong = {}, []
    for place, one in given.items():
        try:
            made[place] = make(one)
        except UserError as error:
            wrong.append(f"{place}: {error}")
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        heading = [f"{len(wrong)} lines cannot be answered:"] if len(wrong) > 1 else []
        raise UserError("\n  ".join(heading + wrong[:SHOWN] + more))
    return made


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text (byte 0x{line[error.start]:02x} at {error.start})") from None


def _parsed(line: bytes, sampling: Sampling) -> Sample:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON ({error}); expected an object a line") from None
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        raise UserError('expected an object with a text as prompt, as {"prompt": "Once", "tokens": 20}')
    fields = {name: _field(name, value) for name, value in given.items() if name != "prompt"}
    return Sample(given["prompt"], replace(sampling, **fields))


def _field(name: str, value: Any) -> Any:
    """A value of JSON as `Sampling` has it."""
    if name not in FIELDS:
        raise UserError(f"unknown field {name!r}.{suggest(name, ['prompt', *FIELDS])}")
    if name == "stop" and isinstance(value, str):
        value = [value]
    if name == "logit_bias" and isinstance(value, dict):  # keys of JSON are texts
        value = {int(key) if key.isdecimal() and len(key) < 20 else key: bias for key, bias in value.items()}
    try:
        return fit(value, FIELDS[name])
    except Mismatch as error:
        raise UserError(f"{name}{error.at}: {error}") from None


@contextmanager
def _lines(out: Path | None, report: Report) -> Iterator[Callable[[str], object]]:
    """Writes a line, at once and whole. A file has its name once all are there; what ends before leaves one beside it,
    with the lines until then, which is said."""
    if out is None:
        yield lambda line: print(line, flush=True)
        return
    part = free_name(out, ".part")
    try:
        with writing(part, "Give another --out"):
            with LinesFile(part) as file:
                yield lambda line: file.write(f"{line}\n".encode())
            check_new_file(out, "--out")
            part.rename(out)
    except BaseException:
        if part.is_file() and part.stat().st_size:
            report(f"the texts until then are in {part}")
        else:
            part.unlink(missing_ok=True)
        raise
