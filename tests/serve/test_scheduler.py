"""The scheduler, under an engine that only remembers what each page holds: `memory_engine.py` has what it asserts."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_engine import MemoryEngine, Sizes, random_operations, random_sizes

from axon.errors import UserError
from axon.serve.pages import PagePool
from axon.serve.request import Request, Sampling
from axon.serve.scheduler import Scheduler
from axon.serve.sequence import Sequence

LARGE = Sizes(pages=400, budget=32, max_running=8, max_rows=16)


def scheduler(sizes: Sizes = LARGE) -> Scheduler:
    pools = {window: PagePool(sizes.pages, sizes.size, window) for window in sizes.windows}
    return Scheduler(
        pools,
        budget=sizes.budget,
        max_running=sizes.max_running,
        max_rows_drawn=sizes.max_rows,
        max_prefilling=sizes.max_prefilling,
    )


def sequence(number, prompt, tokens=8, priority=0, **sampling) -> Sequence:
    return Sequence(Request(tuple(prompt), Sampling(tokens=tokens, **sampling), priority), number, number)


def counts(plan) -> dict[int, int]:
    return {part.sequence.number: part.count for part in plan.scheduled}


def deliver(plan, scheduler, token=1) -> None:
    for part in plan.scheduled:
        if part.draws:
            scheduler.accepted(part.sequence, [token])


@pytest.mark.parametrize("repeat", [*range(8), *(pytest.param(i, marks=pytest.mark.slow) for i in range(8, 200))])
def test_random_requests_keep_every_page_and_all_end(repeat, seed):
    rng = random.Random(seed + repeat)
    engine = MemoryEngine(random_sizes(rng), rng.random())
    for _ in range(10):
        random_operations(engine, 60)
        engine.check()
    engine.drain()


def test_random_requests_share_prefixes_are_preempted_and_have_drafts_accepted(seed):
    engine = MemoryEngine(Sizes(pages=22, windows=(None, 9)), seed)
    random_operations(engine, 1500)
    engine.drain()
    assert min(engine.reused, engine.preempted, engine.drafted, len(engine.ended)) > 10


class Serving(RuleBasedStateMachine):
    """Any order of submissions, steps, late deliveries, cancellations and new weights."""

    @initialize(seed=st.integers(0, 2**31))
    def begin(self, seed):
        self.engine = MemoryEngine(random_sizes(random.Random(seed)), seed)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
        scores=st.booleans(),
        has_penalties=st.booleans(),
    )
    def submit(self, prompt, tokens, priority, scores, has_penalties):
        self.engine.submit(prompt, tokens, priority, scores, has_penalties)

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @rule()
    def deliver(self):
        self.engine.deliver()

    @rule()
    def swap(self):
        self.engine.swap()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.engine.cancel(data.draw(st.sampled_from([*self.engine.live])))

    @invariant()
    def every_page_is_accounted_for(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain()


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=15, stateful_step_count=40)


def test_decodes_come_first_and_prefills_share_what_they_leave(rng):
    planner = scheduler(Sizes(pages=400, budget=20, max_running=4, max_rows=4))
    planner.add(sequence(0, [1]))
    deliver(planner.plan(), planner)
    for number, length in enumerate((100, 5, 100), 1):
        planner.add(sequence(number, rng.integers(0, 99, length).tolist()))
    plan = planner.plan()
    assert counts(plan) == {0: 1, 1: 8, 2: 5, 3: 6}  # 16 shared by three: 5 more for each; what is left to the first
    assert [part.draws for part in plan.scheduled] == [True, False, True, False]


def test_steps_overlap_unless_the_host_has_to_know_the_token():
    planner = scheduler()
    planner.add(sequence(0, [1, 2, 3], tokens=3))
    planner.add(sequence(1, [4, 5, 6], tokens=3, presence_penalty=1.0))
    first, second, third = planner.plan(), planner.plan(), planner.plan()
    assert (counts(first), counts(second), counts(third)) == ({0: 3, 1: 3}, {0: 1}, {0: 1})
    assert second.scheduled[0].from_device
    assert not planner.plan().scheduled  # all three tokens of the first are in flight
    deliver(first, planner)
    assert counts(planner.plan()) == {1: 1}


def test_drafts_fill_what_budget_and_rows_are_left_and_rejected_ones_are_not_cached():
    planner = scheduler(Sizes(pages=400, budget=9, max_running=3, max_rows=8))
    several = [sequence(number, [number], tokens=20) for number in range(3)]
    for one in several:
        planner.add(one)
    deliver(planner.plan(), planner)
    for one in several:
        one.drafts = (7, 8, 9, 10)
    plan = planner.plan()
    assert [(part.count, part.drafts, part.rows) for part in plan.scheduled] == [
        (5, (7, 8, 9, 10), 5),
        (2, (7,), 2),
        (1, (), 1),
    ]
    assert counts(planner.plan()) == {2: 1}  # the others wait for what is accepted
    planner.accepted(several[0], [7, 8, 5])
    assert several[0].tokens == [0, 1, 7, 8, 5]
    assert (several[0].cached, several[0].remaining, several[0].pending) == (4, 1, 0)


def test_the_latest_of_the_lowest_priority_is_preempted_and_finds_its_prefix_again():
    planner = scheduler(Sizes(pages=11, size=2, budget=16, max_running=3, max_rows=3))
    for number, priority in enumerate((0, 1, 0)):
        planner.add(sequence(number, range(9 * number, 9 * number + 3), tokens=12, priority=priority))
    preempted = []
    while not preempted:
        plan = planner.plan()
        deliver(plan, planner)
        preempted += plan.preempted
    assert [one.number for one in preempted] == [2]
    assert planner.waiting == preempted
    assert [one.number for one in planner.running] == [1, 0]
    planner.finish(planner.running[1])
    plan = planner.plan()
    assert [one.number for one in plan.admitted] == [2]
    assert preempted[0].reused > 0


@pytest.mark.parametrize(("pages", "max_running"), [(60, 2), (13, 8)], ids=["no place", "no pages"])
def test_one_of_a_higher_priority_takes_the_place_of_the_last_of_a_lower_one(pages, max_running):
    planner = scheduler(Sizes(pages=pages, size=2, budget=32, max_running=max_running, max_rows=16))
    for number in range(2):
        planner.add(sequence(number, range(9 * number, 9 * number + 8), tokens=4))
    deliver(planner.plan(), planner)
    planner.add(sequence(2, range(50, 58), tokens=4))
    plan = planner.plan()
    assert (plan.admitted, plan.preempted) == ((), ())
    deliver(plan, planner)
    urgent = sequence(3, range(70, 78), tokens=4, priority=1)
    planner.add(urgent)
    plan = planner.plan()
    assert plan.admitted == (urgent,)
    assert [one.number for one in plan.preempted] == [1]
    assert [one.number for one in planner.running] == [3, 0]
    assert [one.number for one in planner.waiting] == [1, 2]


def test_nobody_makes_way_in_vain():
    planner = scheduler(Sizes(pages=13, size=2, budget=32, max_running=8, max_rows=16))
    planner.add(sequence(0, range(12), tokens=4, priority=1))
    planner.add(sequence(1, range(20, 24), tokens=4))
    deliver(planner.plan(), planner)
    planner.add(sequence(2, range(30, 42), tokens=4, priority=1))
    plan = planner.plan()
    assert (plan.admitted, plan.preempted) == ((), ())
    assert [one.number for one in planner.running] == [0, 1]


def test_samples_of_one_prompt_compute_it_once(rng):
    planner, prompt = scheduler(), rng.integers(0, 10**6, 103).tolist()
    for number in range(4):
        planner.add(sequence(number, prompt))
    computed = 0
    while planner.waiting or any(one.remaining > 1 for one in planner.running):
        plan = planner.plan()
        computed += sum(part.count for part in plan.scheduled if part.start < len(prompt))
        deliver(plan, planner)
    assert computed == 103 + 3 * 3
    shared = [one.pages[None][:25] for one in planner.running]
    assert shared.count(shared[0]) == 4


def test_new_weights_find_no_prefix_of_the_old_ones_nor_do_old_sequences_make_any_known(rng):
    planner, prompt = scheduler(), rng.integers(0, 10**6, 20).tolist()
    planner.add(old := sequence(0, prompt, tokens=40))
    deliver(planner.plan(), planner)
    planner.new_weights()
    for _ in range(20):
        deliver(planner.plan(), planner)
    planner.finish(old)
    assert planner.groups.pools[None].cached == 0
    planner.add(new := sequence(1, prompt))
    deliver(planner.plan(), planner)
    assert new.reused == 0
    planner.add(newer := sequence(2, prompt))
    planner.plan()
    assert newer.reused == 16


def test_a_long_text_needs_only_its_windows_pages():
    sizes = Sizes(pages=5, size=4, windows=(10,), budget=4, max_running=1, max_rows=1)
    planner, one = scheduler(sizes), sequence(0, range(30), tokens=200)
    planner.check_fits(30, 200)
    planner.add(one)
    for _ in range(8 + 200):
        deliver(planner.plan(), planner)
    assert len(one.tokens) == one.limit
    planner.finish(one)
    assert planner.groups.pools[10].used == 0


def test_later_arrivals_of_the_same_priority_never_hold_up_earlier_ones(seed):
    engine = MemoryEngine(Sizes(pages=14, max_running=4), seed, drafts=0.0)
    began = []
    for number in range(120):  # more than it can serve
        engine.submit([number * 10 + i for i in range(engine.rng.randrange(1, 24))], engine.rng.randrange(1, 12))
        fresh = {*engine.live} - {*began}
        engine.step()
        began += sorted(one.number for one in engine.scheduler.running if one.number in fresh)
    assert len(engine.scheduler.waiting) > 10
    assert began == sorted(began)
    assert {*range(1, 10)} <= {*engine.ended}
    engine.drain()


def test_prompts_that_do_not_fit_together_run_one_after_the_other():
    planner = scheduler(Sizes(pages=11, size=4, budget=8, max_running=4, max_rows=4))
    several = [sequence(number, range(100 * number, 100 * number + 30), tokens=4) for number in range(3)]
    for one in several:
        planner.add(one)
    while planner.running or planner.waiting:
        plan = planner.plan()
        assert len(planner.running) == 1
        assert not plan.preempted
        deliver(plan, planner)
        for one in several:
            if len(one.tokens) == one.limit:
                planner.finish(one)


def test_only_so_many_prefill_at_once_unless_all_fit_into_a_step():
    planner = scheduler(Sizes(pages=400, budget=20, max_running=20, max_rows=20, max_prefilling=2))
    for number, length in enumerate((4, 4, 4, 30, 30, 30)):
        planner.add(sequence(number, range(100 * number, 100 * number + length)))
    assert [one.number for one in planner.plan().admitted] == [0, 1, 2]
    assert [one.number for one in planner.plan().admitted] == [3, 4]


def test_what_can_never_fit_is_refused():
    planner = scheduler(Sizes(pages=6, size=4, windows=(None, 4)))
    planner.check_fits(10, 11)
    with pytest.raises(UserError, match=r"prompt of 10 tokens and 12 more need 6 pages of 4 .* has 5, for 21 tokens"):
        planner.check_fits(10, 12)


def test_every_running_sequence_must_have_a_token_and_a_row_of_a_step():
    with pytest.raises(UserError, match="max_rows_drawn is 3, and max_running is 4"):
        Scheduler({None: PagePool(4, 4)}, budget=4, max_running=4, max_rows_drawn=3)
