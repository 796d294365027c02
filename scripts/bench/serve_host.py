"""The engine without a model: the host's time of a step, and how many slots of its pages have no token."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axon.layout import Layout
from axon.runtime import Runtime
from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.pages import PagePool
from axon.serve.request import Request, Sampling
from axon.serve.sampler import SampleOutput, draw
from axon.serve.scheduler import Scheduler
from axon.serve.sequence import Sequence
from axon.serve.step import Step
from models.llama import Llama

MODEL = Llama(vocab=64, embed=8, layers=1, heads=1, kv_heads=1, mlp=8)


class EmptyStep(Step):
    """One with the arguments, results and donation of the model's, which computes nothing."""

    def __init__(self, runtime: Runtime, length: int):
        super().__init__(runtime, length)
        self._draw = runtime.jit(_nothing_drawn, donate_argnames="last")

    def _logits(self, parameters: Any, variables: Any, cache: Any, last: Any, inputs: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros((inputs.rows.shape[0], self.runtime.module.dims["vocab"])), cache


def _nothing_drawn(logits: jax.Array, last: jax.Array, slots: Any, draws: Any) -> tuple[SampleOutput, jax.Array]:
    shapes = jax.eval_shape(draw, logits, draws)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes), last


def host_milliseconds(running: int = 64, steps: int = 400, rounds: int = 5) -> dict[str, float]:
    """Of a step in which so many requests decode: `Stats.host_seconds` ÷ steps, the median of the rounds; `processor`:
    of all that the process does for it."""
    runtime = Runtime(MODEL, Layout(), devices=jax.devices("cpu")[:1])
    capacity = Capacity(requests=running, length=4096, cache_tokens=running * 1024)
    engine = Engine(runtime, *runtime.initialise(0), capacity=capacity)
    engine._runner._step = EmptyStep(runtime, engine.max_length)
    engine.warm_up()
    rng, found = np.random.default_rng(0), []
    for _ in range(rounds):
        for number in range(running):
            prompt = tuple(rng.integers(0, MODEL.vocab, int(rng.integers(20, 100))).tolist())
            engine.submit(Request(prompt, Sampling(steps + 100, seed=number)))
        while engine.stats().running < running:
            engine.step()
        for _ in range(20):
            engine.step()
        found.append(_steps(engine, steps))
        while engine.busy:
            engine.step()
    milliseconds, processor = np.median(found, axis=0)
    return {"milliseconds": float(milliseconds), "processor": float(processor), "running": running}


def _steps(engine: Engine, steps: int) -> tuple[float, float]:
    before, processor = engine.stats(), time.process_time()
    for _ in range(steps):
        engine.step()
    processor, after = time.process_time() - processor, engine.stats()
    count = after.steps - before.steps
    return 1e3 * (after.host_seconds - before.host_seconds) / count, 1e3 * processor / count


def page_waste(requests: int = 1000, page_size: int = 16, tokens: int = 64 * 1024) -> dict[str, float]:
    """Means over the steps of a mix of requests, while some wait, by the scheduler alone.

    Prompts of 16 to 2,048 tokens and texts of 16 to 1,024, uniform in the logarithm. `of_cache`: slots of pages in use
    without a token ÷ slots of the cache; `of_used`: ÷ slots of pages in use; `used`: pages in use ÷ pages.
    """
    pool, rng = PagePool(1 + tokens // page_size, page_size), np.random.default_rng(0)
    scheduler, found = Scheduler({None: pool}, budget=512, max_running=256, max_rows_drawn=256), []
    prompts, texts = (np.exp(rng.uniform(np.log(16), np.log(end), requests)).astype(int) for end in (2048, 1024))
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = tuple(rng.integers(0, 2**16, prompt).tolist())
        scheduler.add(Sequence(Request(ids, Sampling(int(text))), number, number))
    while scheduler.waiting:
        for part in scheduler.plan().scheduled:
            if part.draws:
                scheduler.accepted(part.sequence, [0])
            if len(part.sequence.tokens) == part.sequence.limit:
                scheduler.finish(part.sequence)
        slots, cached = pool.used * page_size, sum(sequence.cached for sequence in scheduler.running)
        found.append((slots - cached, slots))
    unused, slots = np.mean(found[len(found) // 10 :], axis=0)
    return {"of_cache": float(unused / tokens), "of_used": float(unused / slots), "used": float(slots / tokens)}
