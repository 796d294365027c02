"""Statements of a text, and going on after what cannot be read."""

from hypothesis import example, given
from hypothesis import strategies as st

from axon.config.grammar import Binding, Import, Include, Macro, Reference, parse
from axon.config.mistakes import Mistake, Place

TEXT = """# a heading
import a.b as c
from a import b
include 'x.gin'

NAME = 3
s/t/A.x = [  # wrapped
    1e-3, -2,
    {'k': %NAME},
]
A:
    y = @s/B()
    z = @a.B
last = ('implicit '
        'joining',)"""

fragments = st.lists(
    st.sampled_from([*"@%=:/.,'\"()[]{}#\\\n \t-3x", "\n", "A.b = ", "1", "\n  ", '"""', "$", "é", "\0"])
)


def at(line: int) -> Place:
    return Place("f.gin", line)


def test_every_kind_of_statement_is_read_with_the_line_it_starts_on():
    assert list(parse(TEXT, "f.gin")) == [
        Import(at(2), "a.b", False, "c"),
        Import(at(3), "a.b", True, None),
        Include(at(4), "x.gin"),
        Binding(at(6), "", "NAME", "", 3),
        Binding(at(7), "s/t", "A", "x", [0.001, -2, {"k": Macro("NAME")}]),
        Binding(at(12), "", "A", "y", Reference("B", "s", True)),
        Binding(at(13), "", "A", "z", Reference("a.B", "", False)),
        Binding(at(14), "", "last", "", ("implicit joining",)),
    ]


def test_a_statement_that_cannot_be_read_does_not_hide_the_others():
    statements = list(parse("a = 1\nb = = 2\nc = 3\nd = {'x': (\ne = 5\nf = ]\ng = 7", "f.gin"))
    assert [(type(s), s.place.line) for s in statements] == [
        (Binding, 1),
        (Mistake, 2),
        (Binding, 3),
        (Mistake, 4),
        (Binding, 5),
        (Mistake, 6),
        (Binding, 7),
    ]


@given(fragments.map("".join) | st.text(max_size=60))
@example("a = [\n")
@example("a:\n  b = 1\n c = 2\nd = 3")
@example("\r\x80")
@example("a = '''\nb = 1")
def test_no_text_whatever_raises_or_loses_a_good_statement_before_it(text):
    found = list(parse("good = 1\n\n" + text, "f.gin"))
    assert all(isinstance(statement, Binding | Import | Include | Mistake) for statement in found)
    assert found[0] == Binding(at(1), "", "good", "", 1)
