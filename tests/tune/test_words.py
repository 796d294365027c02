"""The small tasks of quickstarts."""

from axon.tune import Addition


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
