"""The small tasks of quickstarts."""

import pytest

from axon.tune import Addition, Calculator, Words


def answers(task: Addition) -> dict[str, int]:
    return {record["prompt"]: int(record["completion"]) for _, record in task.records()}


def test_careless_sums_are_one_too_many_in_their_share(seed):
    right = answers(Addition(500, terms=3, seed=seed))
    careless = answers(Addition(500, terms=3, careless=0.8, seed=seed))
    assert right == {prompt: sum(map(int, prompt.split("+"))) for prompt in right}
    slips = [careless[prompt] - total for prompt, total in right.items()]
    assert {*slips} == {0, 1}
    assert 300 < sum(slips) < 480, "400 are expected, with a deviation of 9"
    assert answers(Addition(500, terms=3, careless=1.0, seed=seed)) == {one: right[one] + 1 for one in right}


def test_a_share_of_sums_is_asked_of_a_calculator_and_right(seed):
    records = [record for _, record in Addition(500, largest=999, careless=1.0, asked=0.4, seed=seed).records()]
    chats = [[one["content"] for one in record["messages"]] for record in records if "messages" in record]
    assert 140 < len(chats) < 260, "200 are expected, with a deviation of 11"
    for question, call, said, answer in chats:
        assert call == f"{question}="
        assert Calculator().step(None, call) == said == answer
    alone = [record for record in records if "messages" not in record]
    assert all(int(one["completion"]) == sum(map(int, one["prompt"].split("+"))) + 1 for one in alone)


@pytest.mark.parametrize("task", ["reverse", "rotate", "sort"])
def test_careless_words_have_two_letters_exchanged_in_their_share(task, seed):
    made = {"reverse": lambda word: word[::-1], "rotate": lambda word: word[1:] + word[0], "sort": sorted}[task]
    slips = 0
    for _, record in Words(500, task, careless=0.3, seed=seed).records():
        right, said = "".join(made(record["prompt"])), record["completion"]
        if wrong := [at for at, (a, b) in enumerate(zip(right, said, strict=True)) if a != b]:
            first, slips = wrong[0], slips + 1
            assert said == right[:first] + right[first + 1] + right[first] + right[first + 2 :]
    assert 100 < slips < 200, "150 are expected, with a deviation of 10"


def test_of_careless_pairs_the_wrong_answer_is_preferred_in_their_share(seed):
    pairs = [record for _, record in Words(500, pairs=True, careless=0.4, seed=seed).records()]
    assert all(one["prompt"][::-1] in (one["chosen"], one["rejected"]) for one in pairs)
    assert 145 < sum(one["rejected"] == one["prompt"][::-1] for one in pairs) < 255, "200, with a deviation of 11"
