"""Patterns of parameters: one rule wherever they are listed."""

import pytest

from axon.errors import UserError
from axon.nn import ParamSpec
from axon.path_patterns import check_patterns, matches
from axon.run.init_from import InitFrom
from axon.train.optimizers.groups import Group, group_of_each

PATHS = ("embedding/table", "layers/mlp/up", "layers/mlp/up/lora_a", "norm/scale")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("layers/*", PATHS[1:3]),
        (("layers/*",), PATHS[1:3]),
        (("layers/*", "norm/*"), PATHS[1:]),
        ("!*/lora_a", (*PATHS[:2], PATHS[3])),
        (("!*/lora_a", "!norm/*"), PATHS[:2]),
        (("layers/*", "!*/lora_a"), PATHS[1:2]),
    ],
)
def test_one_pattern_and_several_and_those_that_leave_out_mean_the_same_everywhere(patterns, expected):
    assert tuple(path for path in PATHS if matches(path, patterns)) == expected
    assert tuple(path for path in PATHS if InitFrom("runs/x", paths=patterns).takes(path)) == expected
    group = Group(patterns, frozen=True)
    each = group_of_each({path: ParamSpec(("embed",), (4,)) for path in PATHS}, [group])
    assert tuple(path for path in PATHS if each[path] is group) == expected


@pytest.mark.parametrize("patterns", ["layer/*", ("layers/*", "nrm/*"), "!nothing", ("norm/*", "!norm/*")])
def test_a_pattern_that_matches_nothing_is_refused(patterns):
    with pytest.raises(UserError, match=r"X\.paths = .*match(es)? none of the parameters there"):
        check_patterns("X.paths", patterns, PATHS, "there")


def test_only_all_parameters_without_exception_are_the_whole_model():
    whole = {patterns: InitFrom("runs/x", paths=patterns).whole for patterns in ("*", ("*",), ("*", "!norm/*"), "a/*")}
    assert whole == {"*": True, ("*",): True, ("*", "!norm/*"): False, "a/*": False}
