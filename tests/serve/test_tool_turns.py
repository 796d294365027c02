"""Tools, calls and results in the forms of many families: ids and learned tokens beside a rendering by hand."""

import json
import string
from typing import NamedTuple

import pytest

from axon.data.tokenizer import BOS, Bpe, Tokenizer
from axon.serve.chat import Chat

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "</s>", "[INST]"),
    *("[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
)


class Family(NamedTuple):
    """A template, and by hand what it writes: `$` is a content, a name and arguments as JSON, a list of tools.

    Of an assistant's turn: what is before it, of one call what stands between `calls`, and its end, which is learned,
    and what is after that.
    """

    template: str
    opening: str
    tools: str
    system: str
    user: str
    result: str
    before: str
    calls: tuple[str, str, str, str]
    """Before all, of each with $NAME and $ARGUMENTS, between two, and after all."""
    closed: str
    after: str = ""


EACH, END, ASKS = "{% for m in messages %}", "{% endfor %}", "{% if add_generation_prompt %}"
CALLS = "{% for c in m.tool_calls %}"
FAMILIES = {
    "qwen": Family(
        "{% if tools %}<|im_start|>system\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>"
        + "<|im_end|>\n{% endif %}"
        + EACH
        + "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        + CALLS
        + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        + "\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endif %}"
        + END
        + ASKS
        + "<|im_start|>assistant\n{% endif %}",
        "",
        "<|im_start|>system\n<tools>\n$EACH\n</tools><|im_end|>\n",
        "<|im_start|>system\n$<|im_end|>\n",
        "<|im_start|>user\n$<|im_end|>\n",
        "<|im_start|>user\n<tool_response>\n$\n</tool_response><|im_end|>\n",
        "<|im_start|>assistant\n",
        ("", '<tool_call>\n{"name": "$NAME", "arguments": $ARGUMENTS}\n</tool_call>', "", ""),
        "<|im_end|>",
        "\n",
    ),
    "llama3": Family(
        "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>"
        + "{% endif %}"
        + EACH
        + "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
        + "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
        + CALLS
        + '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
        + "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endif %}"
        + END
        + ASKS
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        BOS,
        "<|start_header_id|>system<|end_header_id|>\n\n[$ALL]<|eot_id|>",
        "<|start_header_id|>system<|end_header_id|>\n\n$<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n$<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"$"<|eot_id|>',
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("", '{"name": "$NAME", "parameters": $ARGUMENTS}', "", ""),
        "<|eot_id|>",
    ),
    "mistral": Family(
        "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        + EACH
        + "{% if m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}"
        + "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        + "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %} {{ m.content }}{% endif %}</s>"
        + "{% else %}[INST] {{ m.content }} [/INST]{% endif %}"
        + END,
        BOS,
        "[AVAILABLE_TOOLS] [$ALL][/AVAILABLE_TOOLS]",
        "[INST] $ [/INST]",
        "[INST] $ [/INST]",
        "[TOOL_RESULTS] $[/TOOL_RESULTS]",
        "",
        ("[TOOL_CALLS] [", '{"name": "$NAME", "arguments": $ARGUMENTS}', ", ", "]"),
        "</s>",
    ),
    "phi4": Family(
        "{% if tools %}<|system|><|tool|>{{ tools | tojson }}<|/tool|><|end|>{% endif %}"
        + EACH
        + "{% if m.role == 'tool' %}<|tool_response|>{{ m.content }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
        + "{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}"
        + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        + "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tool_call|>{% endif %}<|end|>{% endif %}"
        + END
        + ASKS
        + "<|assistant|>{% endif %}",
        "",
        "<|system|><|tool|>[$ALL]<|/tool|><|end|>",
        "<|system|>$<|end|>",
        "<|user|>$<|end|>",
        "<|tool_response|>$<|end|>",
        "<|assistant|>",
        ("<|tool_call|>[", '{"name": "$NAME", "arguments": $ARGUMENTS}', ", ", "]<|/tool_call|>"),
        "<|end|>",
    ),
    "harmony": Family(
        "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
        + EACH
        + "{% if m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
        + "{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}<|start|>assistant{% for c in m.tool_calls %}"
        + "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
        + "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        + "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        + "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
        + END
        + ASKS
        + "<|start|>assistant{% endif %}",
        "",
        "<|start|>developer<|message|>[$ALL]<|end|>",
        "<|start|>system<|message|>$<|end|>",
        "<|start|>user<|message|>$<|end|>",
        '<|start|>functions to=assistant<|channel|>commentary<|message|>"$"<|end|>',
        "<|start|>assistant",
        ("", "<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGUMENTS<|call|>", "", ""),
        "<|end|>",
    ),
    "deepseek": Family(
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n\n{% endif %}"
        + EACH
        + "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        + "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}"
        + "<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        + "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}"
        + "<｜tool▁call▁end｜>{% endfor %}"
        + "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}"
        + END
        + ASKS
        + "<｜Assistant｜>{% endif %}",
        BOS,
        "[$ALL]\n\n",
        "$",
        "<｜User｜>$",
        "<｜tool▁output▁begin｜>$<｜tool▁output▁end｜>",
        "<｜Assistant｜>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGUMENTS<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁end｜>",
        ),
        "<｜end▁of▁sentence｜>",
    ),
}
BOTH = "qwen", "phi4", "deepseek"
"""Families that write a message's content and its calls."""


@pytest.fixture(scope="module")
def tokenizer():
    texts = [" ".join([*(family.template for family in FAMILIES.values()), string.printable])]
    inner = Bpe(vocab=340).train(iter(texts * 3), report=lambda _: None)._inner
    inner.add_special_tokens([*SPECIAL])
    return Tokenizer(inner, inner.token_to_id(BOS))


def words(rng):
    return "x" + "".join(rng.choice([*"abc 12"], size=rng.integers(1, 20))).strip() + "."


def talk(rng, name):
    """Two rounds of a question, one or two calls, their results, and an answer."""
    messages = [{"role": "system", "content": words(rng)}] if rng.random() < 0.5 else []
    for _ in range(2):
        calls = [
            {"name": "f" + "ab"[one], "arguments": {"q": words(rng), "n": int(rng.integers(9))}} for one in range(2)
        ]
        calls = calls[: rng.integers(1, 3)]
        said = words(rng) if name in BOTH and rng.random() < 0.5 else ""
        messages += [
            {"role": "user", "content": words(rng)},
            {
                "role": "assistant",
                "content": said,
                "tool_calls": [{"type": "function", "function": one} for one in calls],
            },
            *({"role": "tool", "content": words(rng)} for _ in calls),
            {"role": "assistant", "content": words(rng)},
        ]
    return messages


def by_hand(family, name, messages, tools):
    """Pieces of the text, each with whether it is learned."""
    listed = [json.dumps(one) for one in tools]
    text = family.tools.replace("$EACH", "\n".join(listed)).replace("$ALL", ", ".join(listed))
    pieces = [(family.opening + text, False)]
    for message in messages:
        if message["role"] != "assistant":
            form = {"system": family.system, "user": family.user, "tool": family.result}[message["role"]]
            pieces.append((form.replace("$", message["content"]), False))
            continue
        first, each, between, last = family.calls
        functions = [one["function"] for one in message.get("tool_calls", ())]
        calls = [
            each.replace("$NAME", one["name"]).replace("$ARGUMENTS", json.dumps(one["arguments"])) for one in functions
        ]
        plain = {"mistral": " ", "harmony": "<|channel|>final<|message|>"}.get(name, "") + message["content"]
        called = (message["content"] if name in BOTH else "") + first + between.join(calls) + last
        closed = "" if calls and name == "harmony" else family.closed
        pieces += [(family.before, False), ((called if calls else plain) + closed, True), (family.after, False)]
    return pieces


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_learned_and_tools_and_results_are_read(name, tokenizer, tmp_path, rng):
    family = FAMILIES[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": family.template}))
    chat = Chat.of(tmp_path, tokenizer)
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": f"f{one}", "parameters": parameters}} for one in "ab"]
    for _ in range(6):
        messages = talk(rng, name)
        pieces = by_hand(family, name, messages, tools)
        turns = chat.turns(messages, tools)
        assert tokenizer.decode(turns.ids) == "".join(text for text, _ in pieces)
        written = [token for token, own in zip(turns.ids, turns.learned, strict=True) if own]
        assert tokenizer.decode(written) == "".join(text for text, learned in pieces if learned)
        assert turns.ids.count(tokenizer.bos) == bool(family.opening)
