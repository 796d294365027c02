"""`axon bench serve`: the engine's throughput, its host's time, what a cached prefix saves and what pages waste."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from axon.layout import Layout
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.request import Request, Sampling
from models.llama import Llama
from scripts.bench import reference
from scripts.bench.serve_host import host_milliseconds, page_waste
from scripts.bench.timing import progress

PROMPTS, TEXTS = (16, 256), (8, 128)
"""Tokens, from and to, uniform in the logarithm."""

Work = Callable[[Sequence[Request]], int]
"""Answers requests, and says how many tokens of their texts it made."""


def run(
    model: Llama = reference.MODEL,
    requests: int = 48,
    concurrent: int = 16,
    alone: int = 6,
    prefix: int = 1000,
    rounds: int = 3,
) -> dict[str, Any]:
    """Medians of `rounds` rounds, everything in turn, greedy, in float32.

    `throughput`, `processor`: texts' tokens a second, and a second of processor time: of the `engine` with all
    `requests`, `concurrent` at once; the engine with one after the other (`alone` of them); with batches of
    `concurrent` padded to their longest prompt and text, whose padding does not count (`padded`); and where they can be
    imported, of transformers' generate with the same weights, one after the other and in padded batches.
    `ratios`, `ratios_processor`: the engine's ÷ each other's. `first_token`: seconds to the first token of a prompt of
    `prefix` tokens, `uncached` and `cached`. `host`, `waste`: see `scripts.bench.serve_host`. `compiles`: after the
    warm-up.
    """
    runtime = Runtime(model, Layout(), devices=jax.devices("cpu")[:1])
    parameters, variables = runtime.initialise(0)
    engine = Engine(runtime, parameters, variables, capacity=Capacity(requests=concurrent, tokens=256, length=2048))
    progress("serve: compiling")
    engine.warm_up()
    compiled, asked = engine.stats().compiles, drawn_requests(np.random.default_rng(0), requests, model.vocab)
    works: dict[str, tuple[Work, Sequence[Request]]] = {
        "engine": (lambda asked: answer(engine, asked), asked),
        "alone": (lambda asked: sum(answer(engine, [one]) for one in asked), asked[:alone]),
        "padded": (lambda asked: _padded(engine, asked, concurrent), asked),
    }
    if find_spec("transformers") and find_spec("torch"):
        from scripts.bench.serve_theirs import Theirs

        theirs = Theirs(model, parameters)
        _compare(engine, theirs, asked[:alone])
        works["transformers_alone"] = (lambda asked: theirs.answer(asked, 1), asked[:alone])
        works["transformers_padded"] = (lambda asked: theirs.answer(asked, concurrent), asked)
    rates = _rates(engine, parameters, works, rounds)
    return {
        "throughput": {name: float(np.median(found[:, 0])) for name, found in rates.items()},
        "processor": {name: float(np.median(found[:, 1])) for name, found in rates.items()},
        "ratios": _ratios(rates, 0),
        "ratios_processor": _ratios(rates, 1),
        "first_token": _first_token(engine, parameters, prefix, model.vocab, rounds),
        "compiles": engine.stats().compiles - compiled,
        "steps": engine.stats().steps,
        "host": host_milliseconds(),
        "waste": page_waste(),
        "rounds": rounds,
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    names = {
        "engine": "the engine",
        "alone": "one after the other",
        "padded": "padded batches",
        "transformers_alone": "transformers, one after the other",
        "transformers_padded": "transformers, padded batches",
    }
    speed, ratios, first = result["throughput"], result["ratios"], result["first_token"]
    return [
        *((names[name], f"{found:,.0f} tokens/s") for name, found in speed.items()),
        *((f"the engine ÷ {names[name]}", f"{found:.1f}") for name, found in ratios.items()),
        *((f"of processor time ÷ {names[name]}", f"{x:.1f}") for name, x in result["ratios_processor"].items()),
        ("first token, uncached", f"{1e3 * first['uncached']:,.0f} ms"),
        ("first token, cached ÷ uncached", f"{first['ratio']:.3f}"),
        ("the host's work of a step, 64 running", f"{result['host']['milliseconds']:.2f} ms"),
        ("slots of pages in use without a token", f"{100 * result['waste']['of_cache']:.1f} % of the cache"),
        ("programs compiled after the warm-up", f"{result['compiles']}"),
    ]


def drawn_requests(rng: np.random.Generator, count: int, vocab: int) -> list[Request]:
    """Greedy ones, with nothing in common."""

    def length(low: int, high: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    return [
        Request(tuple(rng.integers(0, vocab, length(*PROMPTS)).tolist()), Sampling(length(*TEXTS), temperature=0))
        for _ in range(count)
    ]


def answer(engine: Engine, requests: Sequence[Request]) -> int:
    """Ask all at once; the tokens of all their texts."""
    return sum(len(ids) for ids in texts(engine, requests))


def texts(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Of each request its text's ids."""
    found: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for update in engine.step():
            found[update.request] += update.ids
    return list(found.values())


def _padded(engine: Engine, requests: Sequence[Request], size: int) -> int:
    """A batch after the other, each as long as its longest prompt and text."""
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        prompt = max(len(request.prompt) for request in batch)
        text = Sampling(max(request.sampling.tokens for request in batch), temperature=0)
        answer(engine, [Request((0,) * (prompt - len(one.prompt)) + one.prompt, text) for one in batch])
    return sum(request.sampling.tokens for request in requests)


def _compare(engine: Engine, theirs: Any, requests: Sequence[Request]) -> None:
    """Raise `AssertionError` unless both write nearly the same: rounding may part them after some tokens."""
    pairs = zip(texts(engine, requests), theirs.texts(requests, 1), strict=True)
    same = [next((n for n, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x)) / len(x) for x, y in pairs]
    assert np.mean(same) > 0.5, f"transformers writes something else: the same parts of the texts are {same}"


def _rates(engine: Engine, parameters: Any, works: Any, rounds: int) -> dict[str, np.ndarray]:
    """Of each work `rounds 2`, tokens a second and a second of processor time; a first round does not count."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, (work, requests) in works.items():
            engine.swap(parameters)  # no prefix of the last round is known
            progress(f"serve: round {number}, {name}")
            begun, processor = time.perf_counter(), time.process_time()
            tokens = work(requests)
            rates[name].append((tokens / (time.perf_counter() - begun), tokens / (time.process_time() - processor)))
    return {name: np.array(found[1:]) for name, found in rates.items()}


def _ratios(rates: dict[str, np.ndarray], of: int) -> dict[str, float]:
    """The engine's ÷ each other's: the median of the rounds' own."""
    own = rates["engine"]
    return {name: float(np.median(own[:, of] / found[:, of])) for name, found in rates.items() if name != "engine"}


def _first_token(engine: Engine, parameters: Any, length: int, vocab: int, rounds: int) -> dict[str, float]:
    """Seconds, wall and processor, of a prompt that is unknown, and at once again."""
    prompt = tuple(np.random.default_rng(1).integers(0, vocab, length).tolist())
    request, found = Request(prompt, Sampling(1, temperature=0)), []
    for _ in range(rounds + 2):
        engine.swap(parameters)
        both = []
        for _ in range(2):
            begun, processor = time.perf_counter(), time.process_time()
            answer(engine, [replace(request)])
            both += [time.perf_counter() - begun, time.process_time() - processor]
        found.append(both)
    uncached, processor, cached, again = np.median(found[1:], axis=0)
    return {
        "uncached": float(uncached),
        "cached": float(cached),
        "ratio": float(cached / uncached),
        "ratio_processor": float(again / processor),
    }
