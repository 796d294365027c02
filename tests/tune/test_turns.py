"""Messages and tools as files have them: JSON in texts, ShareGPT's speakers, keys of their own, and Arrow's nulls."""

import json
from dataclasses import replace

import pytest

from axon.data import Bpe, HuggingFace, JsonLines, Parquet, TokenizerFile
from axon.errors import UserError
from axon.tune import Chats
from axon.tune.formats import CHATS, LABELLED, Conversation, read_example
from axon.tune.turns import Names


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [tool("weather", city={"type": "string"}), tool("add", a={"type": "number"}, b={"type": "number"})]
TALK = [
    {"role": "user", "content": "warm?"},
    {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Rome"), call("add", a=1, b=2)]},
    {"role": "tool", "content": "30"},
    {"role": "assistant", "content": "yes"},
]


def silent(line):
    pass


@pytest.mark.parametrize(
    "tools",
    [
        TOOLS,
        json.dumps(TOOLS),
        [json.dumps(one) for one in TOOLS],
        json.dumps([one["function"] for one in TOOLS]),
    ],
)
def test_tools_may_be_json_and_functions_alone(tools):
    assert read_example({"messages": TALK, "tools": tools}, "here", CHATS) == (Conversation((*TALK,), (*TOOLS,)),)


@pytest.mark.parametrize("none", ["", "[]", "null", []])
def test_a_column_may_say_that_there_are_no_tools(none):
    assert read_example({"messages": TALK, "tools": none}, "here", CHATS) == (Conversation((*TALK,)),)


@pytest.mark.parametrize("tools", ["{", "3", [3], '["{"]', {"name": "f"}])
def test_what_is_no_list_of_tools_is_refused_by_its_column(tools):
    with pytest.raises(UserError, match=r"file:3: column 'tools' has .*expected"):
        read_example({"messages": TALK, "tools": tools}, "file:3", CHATS)


def test_calls_and_results_of_sharegpt_are_those_of_openai():
    calls = [one["function"] for one in TALK[1]["tool_calls"]]
    said = [("human", "warm?"), ("function_call", json.dumps(calls)), ("observation", "30"), ("gpt", "yes")]
    turns = [{"from": speaker, "value": value} for speaker, value in said]
    assert read_example({"conversations": turns}, "here", CHATS) == (Conversation((*TALK,)),)
    legacy = [TALK[0], {"role": "assistant", "content": None, "function_call": calls[0]}]
    expected = {"role": "assistant", "content": None, "tool_calls": TALK[1]["tool_calls"][:1]}
    assert read_example({"messages": legacy}, "here", CHATS) == (Conversation((TALK[0], expected)),)
    turns[1]["value"] = "weather(Rome)"
    with pytest.raises(UserError, match=r"'conversations' has .*expected calls as JSON"):
        read_example({"conversations": turns}, "here", CHATS)


def test_keys_and_roles_are_what_a_person_says_they_are():
    said = [{"speaker": who, "said": one["content"]} for who, one in zip(("Client", "Bot"), TALK[::3], strict=True)]
    names = Names({"messages": "dialog", "role": "speaker", "content": "said"}, {"Client": "user", "Bot": "assistant"})
    assert read_example({"dialog": said}, "here", CHATS, names) == (Conversation((*TALK[::3],)),)
    for own, missing in (({}, "no roles"), (names.columns, "no keys")):
        with pytest.raises(UserError, match="field columns, as" if not own else "field roles, as {'Client': 'user'}"):
            read_example({"messages": said} if not own else {"dialog": said}, missing, CHATS, Names(own))


def test_a_label_may_be_of_sharegpts_turns():
    turns = [{"from": "human", "value": "warm?"}, {"from": "gpt", "value": "yes"}]
    prompt, answer = read_example(
        {"conversations": turns, "kto_tag": True}, "here", LABELLED, Names({"label": "kto_tag"})
    )
    assert (prompt, answer) == (Conversation((TALK[0],)), Conversation((TALK[3],)))


TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def chats(folder, *sources):
    """Data by a template that writes tools and calls."""
    inner = Bpe(vocab=257).train(iter([TEMPLATE] * 3), report=silent)
    inner.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Chats(2048, 2, sources, TokenizerFile(str(folder / "tokenizer.json")), held_out=0.0, threads=0)


@pytest.mark.parametrize("kind", ["Parquet", "HuggingFace"])
def test_arrows_tables_have_the_tools_and_calls_that_were_written(kind, tmp_path, rng, caches):
    """Arrow gives each object of a column all keys that any has, with nulls; a template would write them."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    answers = [str(number) for number in rng.integers(1000, size=6)]
    records = [{"messages": [*TALK[:3], {**TALK[3], "content": one}], "tools": TOOLS} for one in answers]
    records += [{"messages": [TALK[0], TALK[3]], "tools": None}]
    (folder := tmp_path / "of").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(records), folder / "x.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    source = {"Parquet": Parquet, "HuggingFace": HuggingFace}[kind](str(folder))
    found = [read_example(record, where, CHATS) for where, record in source.records()]
    assert found == [read_example(record, "here", CHATS) for record in records]
    lines = chats(tmp_path, JsonLines(str(tmp_path / "x.jsonl")))
    digests = [
        replace(lines, sources=(one,)).prepare(silent).splits["train"].digest() for one in (*lines.sources, source)
    ]
    assert digests[0] == digests[1]
