"""Rewards: what the built-in ones say, and that what one does wrong costs its answer and a line alone."""

import asyncio
import time
from dataclasses import replace

import likes
import numpy as np
import pytest

from axon.errors import UserError
from axon.tune import MatchesSchema, MathEqual
from axon.tune.judge import Judge
from axon.tune.rewards import ExactMatch, Matches, Numeric, Overlong, Sampled, Similar, check_rewards

PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


def sampled(answer="", reference="", ids=(1,), prompt="a prompt"):
    return Sampled(prompt, answer, ids, reference=reference, where="document 4 of file")


@pytest.mark.parametrize(
    ("reward", "answer", "reference", "expected"),
    [
        (ExactMatch(), " 17\n", "17", 1),
        (ExactMatch(), "17.", "17", 0),
        (Similar(), " abcd", "abxd\n", 0.75),
        (Similar(), "", "ab", 0),
        (Numeric(), "so 3 + 4 is 7", "7.0", 1),
        (Numeric(), "about 1,200", "1200", 1),
        (Numeric(), "-.5e1", "-5", 1),
        (Numeric(), "7, or 8", "7", 0),
        (Numeric(), "none", "7", 0),
        (Numeric(tolerance=0.5), "7.4", "7", 1),
        (Matches(r"<think>.*</think>\d+"), "<think>a\nb</think>12", "", 1),
        (Matches(r"\d"), "12", "", 0),
        (MatchesSchema(PERSON), ' {"age": 3}\n', "", 1),
        (MatchesSchema(PERSON), '{"age": -3}', "", 0),
        (MatchesSchema(PERSON), '{"age": NaN}', "", 0),
        (MatchesSchema(PERSON), '{"age": 3} so', "", 0),
        (MatchesSchema({}), "[" * 100_000, "", 0),
        (MathEqual(), r"so it is \boxed{\frac{1}{2}}", "0.5", 1),
        (MathEqual(), r"$(x + 1)^2$", "x^2 + 2x + 1", 1),
        (MathEqual(), r"$\{2, 1\}$", r"\{1, 2\}", 1),
        (MathEqual(), r"\boxed{0.51}", r"\frac12", 0),
        (MathEqual(), "I do not know", "17", 0),
    ],
    ids=str,
)
def test_built_in_rewards(reward, answer, reference, expected):
    assert reward(sampled(answer, reference)) == expected


def test_an_answer_that_did_not_end_is_not_right():
    assert ExactMatch()(replace(sampled("17", "17"), ended=False)) == 0
    assert Similar()(replace(sampled("17", "17"), ended=False)) == 0


def test_an_answer_close_to_the_limit_is_punished_by_its_length(rng):
    """Equation 13 of DAPO, L_max = `tokens` and L_cache = `margin`."""
    for length in rng.integers(1, 40, 20):
        expected = 0 if length <= 20 else max((20 - length) / 10, -1)
        assert Overlong(30, 10)(sampled(ids=(1,) * length)) == pytest.approx(expected)


def test_rewards_are_summed_by_their_weights(rng):
    ids = [tuple(rng.integers(1, 99, n)) for n in (3, 1)]
    rewards = {"first": lambda one: one.ids[0], "length": lambda one: len(one.ids), "right": ExactMatch()}
    judge = Judge(rewards, {"length": -0.5}, 10.0)
    scores = judge([sampled("x", "x", ids[0]), sampled("x", "y", ids[1])])
    np.testing.assert_allclose(scores.total, [ids[0][0] - 1.5 + 1, ids[1][0] - 0.5])
    np.testing.assert_array_equal(scores.each["length"], [3, 1])


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (likes.raises, ("KeyError", "'an answer'")),
        (likes.ends, ("SystemExit", "3")),
        (likes.text, ("'an answer'", "must be a finite number")),
        (likes.undefined, ("nan", "must be a finite number")),
        (likes.hangs, ("not done after 1 seconds",)),
        (Numeric(), ("ValueError", "no number")),
    ],
    ids=["raises", "ends", "text", "nan", "hangs", "no reference"],
)
def test_what_a_reward_does_wrong_costs_its_answers_and_one_line(reward, said):
    lines, began = [], time.monotonic()
    limit = 1.0 if reward is likes.hangs else 20.0
    judge = Judge({"good": lambda one: 1.0, "bad": reward}, {}, limit, lines.append)
    scores = judge([sampled("an answer"), sampled("another")])
    assert np.isnan(scores.total).all()
    assert scores.each["good"].tolist() == [1, 1]  # asked after the other had failed
    (line,) = lines
    for part in ("'bad'", ".py:", "2 of 2 answers", "'an answer' to document 4 of file", *said):
        assert part in line
    assert time.monotonic() - began < 30  # for so long one sleeps that hangs


def test_coroutines_are_asked_of_several_answers_at_once():
    """Each for the limit's time: of 40, 16 at a time, all are there in the time of three."""
    lines, waiting, most = [], 0, 0

    async def slow(one):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(5 if one.answer == "3" else 0.3)
        waiting -= 1
        return float(one.answer)

    scores = Judge({"slow": slow}, {}, 2.0, lines.append)([sampled(str(number)) for number in range(40)])
    expected = np.where(np.arange(40) == 3, np.nan, np.arange(40))
    np.testing.assert_array_equal(scores.total, expected)
    assert most == 16
    assert "not done after 2 seconds" in lines[0]
    assert "1 of 40 answers" in lines[0]


def test_a_schema_that_is_none_is_told_at_the_start():
    with pytest.raises(UserError, match=r"MatchesSchema\.schema.*\$\.type"):
        MatchesSchema({"type": "objekt"}).check()


def test_a_right_answer_without_mathematics_costs_its_answers():
    with pytest.raises(ValueError, match="no mathematics"):
        MathEqual()(sampled("1", "none at all"))


def test_the_answers_after_one_that_hangs_are_judged():
    judge = Judge({"slow": lambda one: time.sleep(30) if one.answer == "slow" else 2.0}, {}, 1.0, [].append)
    assert judge([sampled("slow"), sampled("fast")]).total.tolist()[1:] == [2.0]


@pytest.mark.parametrize(
    ("rewards", "weights", "said"),
    [
        ({"mine": likes.no_arguments}, {}, ("Field['mine']", "likes.py:", "reward(sampled)")),
        ({}, {}, ("Field is empty", "@ExactMatch()")),
        ({"mine": likes.short}, {"min": 2.0}, ("'min'", "expected of mine")),
    ],
)
def test_a_mistake_is_told_at_the_start(rewards, weights, said):
    with pytest.raises(UserError) as error:
        check_rewards(rewards, weights, "Field")
    assert all(part in str(error.value) for part in said), error.value


def test_a_pattern_that_is_none_is_shown():
    with pytest.raises(UserError, match=r"Matches\.pattern is '\('"):
        Matches("(")
