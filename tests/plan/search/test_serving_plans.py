"""Plans for serving: the steady state by hand and beside a simulated engine, and what each plan holds."""

import math
import random
from dataclasses import replace

import pytest

from axon.chips import chips
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.plan.predict.links import Bandwidths
from axon.plan.search.plans import ROOM
from axon.plan.search.refusals import serving_refusal
from axon.plan.search.serving_plans import OVERLOADED, EngineKind, ServingPlanner, rows_for, steady_state
from axon.plan.workload import Workload
from axon.precision import Precision
from axon.run import Serve, serving_program
from axon.serve.capacity import Capacity
from models.llama import Llama

LLAMA = Llama(vocab=32_000, embed=4096, layers=8, heads=32, kv_heads=8, mlp=14_336)


@pytest.fixture
def draw(seed):
    return random.Random(seed)


def test_a_steady_state_by_hand():
    workload = Workload(2, 100, 10, 1, 1)
    found = steady_state(lambda tokens, rows: 0.01 if tokens < 50 else 0.03, workload, 2, 101)
    assert found.busy == pytest.approx(2 * 1 * 0.03)  # one step of 100 tokens for each
    assert found.tpot == pytest.approx(0.01 / (1 - 2 * 0.02))
    assert found.rows == pytest.approx(2 * 10 * found.tpot)
    assert found.ttft == pytest.approx(found.rows * found.tpot / 2 + 0.03 / (1 - 0.06))
    assert steady_state(lambda tokens, rows: 0.03, workload, 40, 101) == OVERLOADED


def simulated(seconds, workload, budget, draw, requests=3000):
    """Mean ttft and tpot of an engine that gives each request that writes a token in each step, and shares out what is
    left among prompts."""
    now, arrivals, prompts, writing, first, rest = 0.0, [], [], [], [], []
    for _ in range(requests):
        now += draw.expovariate(workload.requests_per_second)
        arrivals.append(now)
    arrivals, now = arrivals[::-1], 0.0
    while arrivals or prompts or writing:
        while arrivals and arrivals[-1] <= now:
            prompts.append([workload.prompt_tokens, arrivals.pop()])
        if not prompts and not writing:
            now = arrivals[-1]
            continue
        left = budget - len(writing)
        for number, prompt in enumerate(sorted(prompts, key=lambda one: one[0])):
            taken = min(prompt[0], left // (len(prompts) - number))
            prompt[0], left = prompt[0] - taken, left - taken
        now += seconds(budget - left, len(writing) + bool(prompts))
        writing = [[tokens - 1, begun] for tokens, begun in writing]
        rest += [(now - begun) / workload.answer_tokens for tokens, begun in writing if tokens <= 0]
        writing = [one for one in writing if one[0] > 0]
        first += [now - arrived for tokens, arrived in prompts if tokens <= 0]
        writing += [[workload.answer_tokens, now] for tokens, _ in prompts if tokens <= 0]
        prompts = [one for one in prompts if one[0] > 0]
    return sum(first) / len(first), sum(rest) / len(rest)


def test_a_steady_state_is_that_of_a_simulated_engine(draw):
    least, each = draw.uniform(0.005, 0.02), draw.uniform(1e-5, 1e-4)

    def seconds(tokens, rows):
        return max(least, each * next(size for size in (16, 64, 256) if size >= tokens)) + 1e-4 * rows

    prompt, answer = draw.randint(300, 1500), draw.randint(20, 150)
    rate = draw.uniform(0.1, 0.6) / (prompt / 256 * seconds(256, 20))
    workload = Workload(rate, prompt, answer, 1, 1)
    while (found := steady_state(seconds, workload, workload.requests_per_second, 256)).busy > 0.75:
        # Nearer to where the queue grows without end, a mean of few requests says little.
        workload = replace(workload, requests_per_second=0.8 * workload.requests_per_second)
    ttft, tpot = simulated(seconds, workload, 256, draw)
    assert found.tpot == pytest.approx(tpot, rel=0.2)
    assert found.ttft == pytest.approx(ttft, rel=0.4)


def kinds(*sizes):
    for tensor in sizes:
        layout = Layout(mesh={"tensor": tensor} if tensor > 1 else {"data": 1})
        serve = Serve(LLAMA, layout, Precision("bfloat16"), "bfloat16", Capacity(64, 256, 4096))
        yield EngineKind("bfloat16", tensor, serving_program(serve, Placement.described(layout, tensor, "tpu")))


def planner(workload, on="v6e:4x4"):
    target = Target.of(on, dict(chips()))
    return ServingPlanner(
        list(kinds(*(n for n in (1, 2, 4) if n <= target.linked))), target, Bandwidths.of(target), workload
    )


def test_every_plan_holds_what_is_stated_and_an_engine_less_does_not(draw):
    workload = Workload(draw.uniform(20, 150), draw.randint(100, 1500), draw.randint(50, 400), 400, 30)
    search = planner(workload)
    plans, missed = search.best()
    assert plans
    assert [one.devices for one in plans] == sorted(one.devices for one in plans)
    for plan in plans:
        assert 1e3 * plan.steady.ttft <= 400
        assert 1e3 * plan.steady.tpot <= 30
        assert plan.memory <= ROOM * search.target.chip.memory
        assert plan.steady.rows <= 0.9 * plan.capacity.requests
        assert (plan.capacity.cache_tokens or 0) >= plan.steady.rows * workload.context
        assert plan.engines == 1 or search.plan(plan.kind, plan.capacity.tokens, plan.engines - 1).unmet
    assert [bool(one.why_not) for one in plans] == [False, *[True] * (len(plans) - 1)]
    assert len(plans) + len(missed) == 3
    assert all(one.unmet for one in missed)


def test_more_requests_never_need_fewer_devices(draw):
    workload = Workload(1, draw.randint(50, 2000), draw.randint(20, 400), 500, 40)
    needed = []
    for rate in (1, 4, 16, 40, 80, 120):
        plans, _ = planner(replace(workload, requests_per_second=rate)).best()
        needed.append(plans[0].devices if plans else math.inf)
    assert needed == sorted(needed)


def test_a_workload_without_a_plan_is_answered_with_the_nearest_and_what_its_steps_take():
    for change, part in (({"tpot_ms": 0.1}, "tpot is"), ({"ttft_ms": 0.1}, "ttft is"), ({}, "cannot keep up")):
        search = planner(replace(Workload(1 if change else 1e5, 500, 100, 500, 50), **change))
        plans, missed = search.best()
        assert not plans
        message = str(serving_refusal(search, missed, lambda target: target.devices == 64))
        assert part in message
        assert "weights" in message
        assert "By prediction it would fit v6e:8x8" in message
    small = planner(Workload(1, 500, 100, 500, 50), "v6e:1x1")
    small = replace(small, target=replace(small.target, chip=replace(small.target.chip, memory=2**30)))
    plans, missed = small.best()
    assert not plans
    assert "no plan fits v6e:1x1" in str(serving_refusal(small, missed, lambda target: False))


def test_rows_are_for_more_than_the_mean():
    assert [rows_for(mean) for mean in (0, 1, 16, 1000)] == [8, 8, 24, 1112]
