"""Patterns as tuples of names, and what is no pattern."""

import pytest

from axon.axes.patterns import PatternError, parse_einsum, parse_names, strip_roles


def test_a_role_is_dropped_from_the_mathematics_and_kept_in_the_name():
    assert parse_names("batch seq.residual embed") == ("batch", "seq.residual", "embed")
    assert strip_roles(("batch", "seq.residual")) == ("batch", "seq")


@pytest.mark.parametrize("pattern", ["seq seq", "seq seq.residual", "a.x a.y"])
def test_a_repeated_axis_is_refused_and_another_name_proposed(pattern):
    with pytest.raises(PatternError, match=r"occurs twice .* own name"):
        parse_names(pattern)


@pytest.mark.parametrize("name", ["b-c", "2x", "a.b.c", "a.", "(a"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(PatternError, match="is not an axis name"):
        parse_names(f"batch {name}")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a b, b c", "should read"),
        ("a b -> a b", "should read"),
        ("a, b, c -> a", "should read"),
        ("a b, b c -> a d", "'d' right of '->'"),
        ("a b, b c -> a", "'c' in one operand"),
    ],
)
def test_a_pattern_that_makes_no_contraction_is_refused(pattern, message):
    with pytest.raises(PatternError, match=message):
        parse_einsum(pattern)


@pytest.mark.parametrize(
    ("pattern", "work"),
    [
        ("batch seq mlp, mlp embed -> batch seq.residual embed", "batch seq mlp, mlp embed -> batch seq embed"),
        ("batch seq.residual embed, embed mlp -> batch seq mlp", "batch seq embed, embed mlp -> batch seq mlp"),
        ("batch seq.residual embed, embed -> batch seq.residual embed",) * 2,
        ("batch.expert embed.expert, embed.expert mlp -> batch.expert mlp",) * 2,
    ],
)
def test_the_work_is_done_under_the_plain_name_where_the_roles_differ(pattern, work):
    made, expected = parse_einsum(pattern).without_ambiguous_roles, parse_einsum(work)
    assert (made.left, made.right, made.out) == (expected.left, expected.right, expected.out)
