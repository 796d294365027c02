"""What the assistant writes of a chat, token by token: by templates of many families, beside plain concatenation."""

import json
import math
import string
from itertools import groupby

import pytest

from axon.data.tokenizer import BOS, Bpe, Tokenizer
from axon.errors import UserError
from axon.serve.chat import PLAIN, Chat

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
    *("</s>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|call|>"),
    *("<|start|>", "<|message|>", "<|return|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
EACH = "{% for m in messages %}"
END = "{% endfor %}"


def asks(prompt):
    return "{% if add_generation_prompt %}" + prompt + "{% endif %}"


def by_role(system, user, assistant, prompt):
    """A template of these texts, in which `$` is the content."""
    texts = {"system": system, "user": user, "assistant": assistant}
    cases = "".join(
        f"{{% if m.role == '{role}' %}}{text.replace('$', '{{ m.content }}')}{{% endif %}}"
        for role, text in texts.items()
    )
    return EACH + cases + END + asks(prompt)


FAMILIES = {
    # name: (template, opening, system, user, before an answer, learned after it, not learned after that)
    "chatml": (
        EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + END + asks("<|im_start|>assistant\n"),
        *("", "<|im_start|>system\n$<|im_end|>\n", "<|im_start|>user\n$<|im_end|>\n", "<|im_start|>assistant\n"),
        *("<|im_end|>", "\n"),
    ),
    "llama3": (
        "{{ bos_token }}"
        + EACH
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + END
        + asks("<|start_header_id|>assistant<|end_header_id|>\n\n"),
        *(BOS, "<|start_header_id|>system<|end_header_id|>\n\n$<|eot_id|>"),
        *("<|start_header_id|>user<|end_header_id|>\n\n$<|eot_id|>",),
        *("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", ""),
    ),
    "mistral": (
        "{{ bos_token }}" + by_role("[INST] $ [/INST]", "[INST] $ [/INST]", " $</s>", ""),
        *(BOS, "[INST] $ [/INST]", "[INST] $ [/INST]", "", "</s>", ""),
    ),
    "gemma": (
        "{{ bos_token }}"
        + EACH
        + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        + END
        + asks("<start_of_turn>model\n"),
        *(BOS, "<start_of_turn>system\n$<end_of_turn>\n", "<start_of_turn>user\n$<end_of_turn>\n"),
        *("<start_of_turn>model\n", "<end_of_turn>", "\n"),
    ),
    "phi": (
        by_role("<|system|>\n$<|end|>\n", "<|user|>\n$<|end|>\n", "<|assistant|>\n$<|end|>\n", "<|assistant|>\n"),
        *("", "<|system|>\n$<|end|>\n", "<|user|>\n$<|end|>\n", "<|assistant|>\n", "<|end|>", "\n"),
    ),
    "zephyr": (
        EACH + "<|{{ m.role }}|>\n{{ m.content }}</s>\n" + END + asks("<|assistant|>\n"),
        *("", "<|system|>\n$</s>\n", "<|user|>\n$</s>\n", "<|assistant|>\n", "</s>", "\n"),
    ),
    "harmony": (
        by_role(
            "<|start|>system<|message|>$<|end|>",
            "<|start|>user<|message|>$<|end|>",
            "<|start|>assistant<|message|>$<|end|>",
            "<|start|>assistant<|message|>",
        ),
        *("", "<|start|>system<|message|>$<|end|>", "<|start|>user<|message|>$<|end|>"),
        *("<|start|>assistant<|message|>", "<|end|>", ""),
    ),
    "deepseek": (
        "{{ bos_token }}" + by_role("$", "<｜User｜>$", "<｜Assistant｜>$<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
        *(BOS, "$", "<｜User｜>$", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", ""),
    ),
    "marked": (
        EACH
        + "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
        + "{% endgeneration %}{{ '\n' }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        + END,
        *("", "<|im_start|>system\n$<|im_end|>\n", "<|im_start|>user\n$<|im_end|>\n", "<|im_start|>assistant\n"),
        *("<|im_end|>", "\n"),
    ),
    "end of documents": (
        by_role("system: $\n", "user: $\n", "answer: $<|endoftext|>\n", "answer:"),
        *("", "system: $\n", "user: $\n", "answer:", BOS, "\n"),
    ),
}
WITH_SPACE = ("mistral", "end of documents")
"""Families whose answer begins with a space."""


@pytest.fixture(scope="module")
def tokenizer():
    texts = [" ".join([*(family[0] for family in FAMILIES.values()), "hello world user assistant", string.printable])]
    inner = Bpe(vocab=340).train(iter(texts * 3), report=lambda _: None)._inner
    inner.add_special_tokens([*SPECIAL])
    return Tokenizer(inner, inner.token_to_id(BOS))


def chat_by(template, tokenizer, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Chat.of(folder, tokenizer)


def words(rng):
    letters = "abc dé中😀.<|"
    return ("x" + "".join(rng.choice([*letters], size=rng.integers(1, 30)))).strip()


def talk(rng, with_system):
    """Of the assistant's messages some have a weight, 0 too."""
    roles = [*(["system"] if with_system else []), *(["user", "assistant"] * int(rng.integers(1, 4)))]
    weighed = [role == "assistant" and rng.random() < 0.5 for role in roles]
    weights = [{"weight": rng.choice([0, 0.5, 1, 2]).item()} if own else {} for own in weighed]
    return [{"role": role, "content": words(rng), **own} for role, own in zip(roles, weights, strict=True)]


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_learned_tokens_are_those_of_a_rendering_by_hand(name, with_system, tokenizer, tmp_path, rng):
    template, opening, system, user, before, closed, after = FAMILIES[name]
    chat = chat_by(template, tokenizer, tmp_path)
    for _ in range(8):
        messages = talk(rng, with_system)
        whole, learned = opening, []
        for message in messages:
            if message["role"] == "assistant":
                written = " " * (name in WITH_SPACE) + message["content"] + closed
                whole += before + written + after
                learned += [(written, message.get("weight", 1))] * bool(message.get("weight", 1))
            else:
                whole += (system if message["role"] == "system" else user).replace("$", message["content"])
        turns = chat.turns(messages)
        assert tokenizer.decode(turns.ids) == whole
        written = [token for token, own in zip(turns.ids, turns.learned, strict=True) if own]
        assert tokenizer.decode(written) == "".join(text for text, _ in learned)
        assert [weight for weight, _ in groupby(filter(None, turns.weights))] == [
            weight for weight, _ in groupby(weight for _, weight in learned)
        ]
        assert list(turns.ids) == chat.ids(messages, add_generation_prompt=False)
        assert turns.ids.count(tokenizer.bos) == whole.count(BOS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_is_what_the_template_writes_between_two_answers(name, tokenizer, tmp_path, rng):
    """From after what is learned of the first to where the second begins."""
    template, _, _, user, before, _, after = FAMILIES[name]
    chat = chat_by(template, tokenizer, tmp_path)
    opened = before if "add_generation_prompt" in template else ""
    for _ in range(4):
        said = words(rng)
        ids = chat.reply([{"role": "user", "content": said}])
        assert tokenizer.decode(ids) == after + user.replace("$", said) + opened
        talk = [{"role": role, "content": words(rng)} for role in ("user", "assistant")]
        turns = chat.turns([*talk, {"role": "user", "content": said}, {"role": "assistant", "content": "x"}])
        first = len(chat.turns(talk).learned) - chat.turns(talk).learned[::-1].index(True)
        assert list(turns.ids[first:][: len(ids)]) == ids


def test_without_a_template_a_reply_is_lines_of_role_and_content(tokenizer):
    reply = Chat.of(None, tokenizer).reply([{"role": "tool", "content": "4<|im_end|>2"}])
    assert tokenizer.decode(reply) == "tool: 4<|im_end|>2\nassistant:"
    assert tokenizer._inner.token_to_id("<|im_end|>") not in reply


def test_without_an_end_in_the_template_the_last_answer_is_followed_by_one_that_is_learned(tokenizer):
    chat, messages = Chat.of(None, tokenizer), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = chat.turns(messages * 2)
    assert tokenizer.decode(turns.ids) == f"{BOS}user: a\nassistant: b\nuser: a\nassistant: b\n{BOS}"
    written = [token for token, own in zip(turns.ids, turns.learned, strict=True) if own]
    assert tokenizer.decode(written) == f" b\n b\n{BOS}"
    assert turns.learned[-1]
    assert not turns.learned[0]


def test_a_call_of_a_tool_is_learned_and_its_answer_is_not(tokenizer, tmp_path):
    template = (
        EACH
        + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function | tojson }}"
        + "{% endfor %}<|im_end|>\n"
        + END
        + asks("<|im_start|>assistant\n")
    )
    call = {"function": {"name": "weather", "arguments": '{"at": "Rome"}'}}
    messages = [
        {"role": "user", "content": "warm?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "30"},
        {"role": "assistant", "content": "yes"},
    ]
    turns = chat_by(template, tokenizer, tmp_path).turns(messages)
    written = tokenizer.decode([token for token, own in zip(turns.ids, turns.learned, strict=True) if own])
    assert written == '<|call|>{"name": "weather", "arguments": {"at": "Rome"}}<|im_end|>yes<|im_end|>'


@pytest.mark.parametrize("name", ["chatml", "mistral", "marked"])
def test_parts_of_an_answer_count_by_their_weights_token_by_token(name, tokenizer, tmp_path, rng):
    """A token by where its text begins, all else of the message by its own weight."""
    chat = chat_by(FAMILIES[name][0], tokenizer, tmp_path)
    for _ in range(4):
        content = "".join(rng.choice([*"abc de"], size=20)).strip() + "."
        talk = [{"role": role, "content": content} for role in ("user", "assistant") * 2]
        first, middle, last = sorted(rng.choice(len(content), size=3, replace=False).tolist())
        parts = [[first, middle, 0], [middle, last, 2.5]]
        turns, plain = chat.turns([*talk[:3], {**talk[3], "weight": 0.5, "weights": parts}]), chat.turns(talk)
        by_character = [
            0 if first <= at < middle else 2.5 if middle <= at < last else 0.5 for at in range(len(content))
        ]
        begin = tokenizer.decode(plain.ids).rindex(content)
        expected = []
        for place, learned in enumerate(plain.learned):
            at = len(tokenizer.decode(plain.ids[:place])) - begin
            weight = 0.5 if at >= -1 else 1.0  # the first answer's; a space may begin the second
            expected.append((by_character[at] if 0 <= at < len(content) else weight) * learned)
        assert turns.ids == plain.ids
        assert list(turns.weights) == expected


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "abc", "weights": [[0, 1, 2]]}, r"messages\[0\]\.weights is of role 'user'"),
        ({"weights": [[2, 9, 1]]}, r"messages\[1\]\.weights has \[2, 9, 1\]; expected .* to ≤ 3"),
        ({"weights": [[0, 2, 1], [1, 3, 1]]}, r"has \[1, 3, 1\]; expected .* 2 ≤ from"),
        ({"weights": [[0, 2, -1]]}, r"has \[0, 2, -1\]; expected"),
        ({"weights": 3}, "not a list"),
    ],
)
def test_parts_that_are_none_are_refused_by_place(message, said, tokenizer, tmp_path):
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "abc"}]
    talk = [message, talk[1]] if "role" in message else [talk[0], talk[1] | message]
    with pytest.raises(UserError, match=said):
        chat_by(FAMILIES["chatml"][0], tokenizer, tmp_path).turns(talk)
    upper = EACH + "{{ m.role }}: {{ m.content | upper }}\n" + END + asks("assistant:")
    with pytest.raises(UserError, match=r"messages\[1\]\.weights: the chat template does not write the content"):
        chat_by(upper, tokenizer, tmp_path).turns(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "abc", "weights": [[0, 1, 2]]}]
        )


def test_a_template_that_rewrites_what_was_said_is_refused_unless_it_marks_turns(tokenizer, tmp_path):
    rewriting = EACH + "{{ loop.length }}{{ m.role }}:{{ m.content }}\n" + END + asks("assistant:")
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(UserError) as error:
        chat_by(rewriting, tokenizer, tmp_path).turns(messages)
    assert {"messages[1]:", "generation", "template"} <= {*str(error.value).split()}
    for weighed, said in ((messages[:1], 1), (messages[:2], -0.5), (messages[:2], math.inf), (messages[:2], "1")):
        with pytest.raises(UserError, match=rf"messages\[{len(weighed) - 1}\]\.weight is {said!r}.*expected"):
            chat_by(PLAIN, tokenizer, tmp_path).turns([*weighed[:-1], {**weighed[-1], "weight": said}])
    with pytest.raises(UserError, match=r"messages\[0\].role is 'assistant'"):
        chat_by(PLAIN, tokenizer, tmp_path).turns(messages[1:])
