"""What a template leaves out is refused by its place: a message of a role, calls, tools; never what it writes."""

import pytest

from axon.errors import UserError
from axon.serve.left_out import check_written
from axon.serve.template import Template

EACH, END = "{% for m in messages %}", "{% endfor %}"
LINES = EACH + "{{ m.role }}: {{ m.content }}\n" + END
CALLS = (
    EACH
    + "{{ m.role }}: {% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% else %}{{ m.content }}{% endfor %}\n"
    + END
)
ASKED = EACH + "{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endif %}" + END
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def talk(rng):
    said = ["".join(rng.choice([*"abc "], size=5)) + "." for _ in range(4)]
    turns = [
        {"role": role, "content": one} for role, one in zip(("system", "user", "tool", "assistant"), said, strict=True)
    ]
    return [*turns[:2], {"role": "assistant", "content": "", "tool_calls": [CALL]}, *turns[2:]]


def check(source, messages):
    template = Template(source, "here")
    check_written(lambda own: template.render({"messages": [*own]}), messages)


@pytest.mark.parametrize("source", [CALLS, CALLS.replace("m.content", "m.content | trim | upper")])
def test_what_the_template_writes_passes_in_whatever_form(source, rng):
    check(source, talk(rng))


@pytest.mark.parametrize(
    ("source", "number", "part"),
    [(LINES, 2, "the tool_calls of role 'assistant'"), (ASKED, 0, "the content of role 'system'")],
)
def test_the_first_that_is_left_out_is_named(source, number, part, rng):
    with pytest.raises(UserError, match=rf"messages\[{number}\]: the chat template leaves out {part}"):
        check(source, talk(rng))


def test_what_is_empty_is_not_missed(rng):
    check(ASKED, [{"role": "system", "content": " "}, *talk(rng)[1:2]])
