"""Each mistake of a person: what the message says, and where."""

import re

import pytest

from axon.config import ConfigError, load
from axon.config.bindings import MOVED

GOOD = """Train.model = @Net()
Train.data = @Data()
Net.layers = 6
Data.seq = 16
Data.batch = 8
"""  # five lines: what a test adds begins at line 6

CASES = {
    "unknown name": ("Layuot.zero = 1", "6: Layuot.zero: unknown name 'Layuot'. Did you mean 'Layout'?"),
    "no name like it": ("Zyx.zero = 1", "6: Zyx.zero: unknown name 'Zyx'. Import it above: from MODULE import Zyx"),
    "not imported": ("Train.model = @GPT2()\nGPT2.layers = 1\nGPT2.heads = 2", "6: Train.model: unknown name 'GPT2'."),
    "unknown reference": ("Train.layout = @Layuot()", "6: Train.layout: unknown name 'Layuot'. Did you mean"),
    "unknown field": ("Layout.msh = {}", "6: Layout.msh: Layout has no field 'msh'. Did you mean 'mesh'?"),
    "field in a block": ("Layout:\n  zero = 1\n  atuo = True", "8: Layout.atuo: Layout has no field 'atuo'."),
    "property": ("Cosine.end = 0.1", "6: Cosine.end: Cosine has no field 'end'. Always 0."),
    "path of fields": ("Train.model.layers = 3", "6: Train.model.layers: unknown name 'Train.model'."),
    "bool for int": ("Train.steps = True", "6: Train.steps: expected int, got True."),
    "float for int": ("Train.steps = 1e3", "6: Train.steps: expected int, got 1000.0."),
    "literal": ("Net.kind = 'gatd'", "6: Net.kind: expected 'plain' | 'gated', got 'gatd'. Did you mean 'gated'?"),
    "in a mapping": ("Layout.mesh = {'data': 'x'}", "6: Layout.mesh['data']: expected int, got 'x'."),
    "too short": ("Optimizer.betas = (0.9,)", "6: Optimizer.betas: expected tuple[float, float], got (0.9,)."),
    "class for object": ("Train.layout = @Layout", "6: Train.layout: expected Layout, got @Layout. Did you mean"),
    "wrong object": ("Train.layout = @Bpe()", "6: Train.layout: expected Layout, got @Bpe(). Write @Layout()."),
    "wrong model": ("Train.teacher = @Bpe()", "6: Train.teacher: expected Model | Data | None, got @Bpe()."),
    "undefined macro": ("STEPS = 3\nTrain.steps = %STEP", "7: Train.steps: undefined macro %STEP. Did you mean"),
    "circular macro": ("A = %B\nB = [%A]\nTrain.extra = %A", "7: circular macro: %A → %B → %A."),
    "circular object": ("Net.inner = @Net()", "6: circular reference: @Net() → Net.inner → @Net()."),
    "required": ("Train.steps = %REQUIRED", "6: Train.steps is REQUIRED: give it a value in a file that"),
    "required, gin's": ("N = %gin.REQUIRED\nTrain.steps = %N", "6: N is REQUIRED: give it a value in a file"),
    "unused": ("GELU = 3", "6: GELU is never used: no used value refers to %GELU."),
    "unused class": ("Sources.path = 'x'\nTrain.data = @d/Data()\nd/Data.sources = []", "6: Sources.path is never"),
    "unused scope": ("big/Net.layers = 9", "6: big/Net.layers is never used: no used value refers to"),
    "hidden by a scope": ("Train.model = @s/Net()\ns/Net.layers = 1", "3: Net.layers is never used: every Net in"),
    "macro named as a class": ("Net = 3", "6: Net is a class or function, not a macro: bind one of its fields"),
    "own check": ("Layout.auto = True\nLayout.zero = 4", "7: Layout: zero is 4; it is 0, 1, 2 or 3"),
    "syntax": ("Net.layers = = 3", "6: cannot read `Net.layers = = 3`: unable to parse value."),
    "bare word": ("Net.kind = gated", "6: cannot read `Net.kind = gated`: 'gated' is not a value. Text is quoted"),
    "lower-case constant": ("Layout.auto = true", "6: cannot read `Layout.auto = true`: 'true' is not a value. Did"),
    "no value": ("Net.layers\nTrain.steps = 3", "6: cannot read `Net.layers`: couldn't parse statement"),
    "open bracket": ("Layout.mesh = {'data': 2\nNet.layers = 3", "6: cannot read `Layout.mesh = {'data': 2`: a"),
    "open bracket, last": ("Train.steps = 3\nTrain.extra = (1,\n  2,\n", "7: cannot read `Train.extra = (1,`: a"),
    "open string": ("Net.kind = 'gated\nTrain.steps = 3", "6: cannot read `Net.kind = 'gated`: "),
    "key twice": ("Layout.mesh = {\n  'data': 2,\n  'data': 4}", "6: cannot read `Layout.mesh = {`: duplicate key"),
    "key that is a list": ("Train.extra = {[1]: 2}", "6: cannot read `Train.extra = {[1]: 2}`: [1] cannot"),
    "bare include": ("include nope.gin", "6: cannot read `include nope.gin`: the file's name is quoted: include 'no"),
    "missing include": ("include 'missing.gin'", "6: there is no file 'missing.gin', neither next to main.gin nor"),
    "circular include": ("include 'main.gin'", "6: circular include: main.gin → main.gin."),
    "no such module": ("import no_such.thing", "6: there is no module 'no_such': neither installed nor in"),
    "no such name": ("from toy_house import Nett", "6: 'toy_house' has no class or function 'Nett'. Did you"),
}  # fmt: skip


@pytest.mark.parametrize(("added", "expected"), CASES.values(), ids=CASES.keys())
def test_one_mistake_gives_one_message_with_its_place(mistakes, added, expected):
    (message,) = mistakes(GOOD + added)
    assert message.startswith(f"main.gin:{expected}")


@pytest.mark.parametrize("owner", ["Net", "Layout", "Train"])
@pytest.mark.parametrize(("field", "now"), MOVED.items())
def test_a_field_that_moved_is_told_where_it_went(mistakes, owner, field, now):
    (message,) = mistakes(f"{GOOD}{owner}.{field} = ()")
    assert message.startswith(f"main.gin:6: {owner}.{field}: ")
    assert f"Execution.{now}" in message


def test_what_an_override_takes_the_use_of_is_no_mistake_of_the_files(mistakes, resolved):
    teacher = "Train.teacher = @small/Net()\nsmall/Net.kind = 'gated'\n"
    assert resolved(GOOD + teacher, "Train.teacher=None").tree.teacher is None
    (message,) = mistakes(GOOD + "small/Net.kind = 'gated'", "Net.layers=3")
    assert message.startswith("main.gin:6: small/Net.kind is never used")
    (message,) = mistakes(GOOD + teacher, "Train.teacher=None", "big/Net.layers=3")
    assert message.startswith("--set: big/Net.layers is never used")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("Net.layers", ["Net.layers", "Name.field=value"]),
        ("Net.layers='six'", ["Net.layers", "expected int", "'six'"]),
        ("Layout.msh={'data': 1}", ["Did you mean 'mesh'?"]),
        ("Layuot.mesh={'data': 1}", ["Did you mean 'Layout'?"]),
        ("layout.mesh={'data': 1}", ["Did you mean 'Layout'?"]),
        ("NET.layers=1", ["Did you mean 'Net'?"]),
        ("Net.LAYERS=1", ["Did you mean 'layers'?"]),
        ("Train.model=@net()", ["Did you mean 'Net'?"]),
        ("Net.kind='\udcff'", ["it is not valid UTF-8"]),
        ("Net.kind=gated", ["Net.kind=gated", "quote"]),
        ("import os", ["import os", "not a single binding"]),
        ("Train.steps=1\nTrain.steps=2", ["not a single binding"]),
        ("", ["not a single binding"]),
        ("Net.layers=", ["Net.layers="]),
    ],
)
def test_a_wrong_override_is_named_as_such(mistakes, override, words):
    (message,) = mistakes(GOOD, override)
    assert message.startswith("--set: ")
    assert all(word in message for word in words), message


def test_all_mistakes_of_all_files_are_reported_together_in_order(write, mistakes):
    write("base/common.gin", "Train.steps = 'many'\nLayout.msh = {}\n")
    found = mistakes(
        "include 'base/common.gin'\nTrain.model = @Nett()\nNet.layers = 'six'\nData.seq = 8\nTrain.data = @Data()\n",
        "Layuot.zero=1",
    )
    starts = [message.split(": ")[0] for message in found]
    assert starts == ["--set", "base/common.gin:1", "base/common.gin:2", "main.gin:2", "main.gin:3", "main.gin:5"]
    assert "Data.batch (int) has no value and no default" in found[-1]


def test_the_message_of_several_mistakes_has_one_line_for_each(resolved):
    with pytest.raises(ConfigError) as caught:
        resolved(GOOD + "Net.kind = 3\nTrain.steps = 'x'\n")
    first, *rest = str(caught.value).split("\n")
    assert first == "2 mistakes in the configuration:"
    assert [line.strip().split(":")[1] for line in rest] == ["6", "7"]


def test_what_is_absent_is_no_mistake_while_a_file_or_a_statement_cannot_be_read(mistakes):
    found = mistakes("include 'gone.gin'\nTrain.steps = %STEPS\nGPT.layers = 3\nNet.layers = 'six'\nNet.a = 3 4\n")
    assert [message.split(": ")[0] for message in found] == ["main.gin:1", "main.gin:4", "main.gin:5"]


def test_reading_goes_on_after_a_statement_that_cannot_be_read(mistakes):
    broken = (
        "Net.layers = = 1\nNet:\n  kind = !\n  layers = 2\nTrain.steps = (\nTrain.extra = 3 +\nLayout.zero = 1\nx y"
    )
    assert [re.split(r"[:]", message)[1] for message in mistakes(GOOD + broken)] == ["6", "8", "10", "11", "13"]


def test_a_file_that_does_not_exist_is_named_with_a_similar_one(write):
    write("quickstart.gin", GOOD)
    with pytest.raises(ConfigError, match=r"nosuch.gin: there is no file 'nosuch.gin'."):
        load("nosuch.gin", ["Net.layers=2"], modules=("toy_house",))
    with pytest.raises(ConfigError, match=r"Did you mean 'quickstart.gin'\?"):
        load("quickstrat.gin", modules=("toy_house",))


def test_a_model_of_ours_that_was_not_imported_is_named_with_its_module(mistakes):
    data = "Train.data = @Data()\nData.seq = 8\nData.batch = 8\n"
    (message,) = mistakes("Train.model = @Llama()\nLlama.layers = 1\nLlama.heads = 2\n" + data)
    assert message == "main.gin:1: Train.model: unknown name 'Llama'. Import it above: from models.llama import Llama"


def test_a_byte_order_mark_is_no_part_of_the_text(folder, resolved):
    (folder / "marked.gin").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load("marked.gin", modules=("toy_house",)).tree == resolved(GOOD).tree


def test_paths_that_the_system_refuses_are_named(folder, mistakes):
    (folder / "loop.gin").symlink_to("loop.gin")
    found = mistakes(f"include 'loop.gin'\ninclude '{'x' * 300}'\n")
    assert "there is no file 'loop.gin'" in found[0]
    assert f"there is no file '{'x' * 300}'" in found[1]
    for path, said in [("loop.gin", "Too many levels"), ("x" * 300, "File name too long"), ("a\0b", "null")]:
        with pytest.raises(ConfigError, match=f"cannot be read: .*{said}"):
            load(path, modules=("toy_house",))


def test_files_that_cannot_be_read_are_named(folder, mistakes):
    (folder / "latin.gin").write_bytes(b"Net.kind = '\xe9'")
    (folder / "sub").mkdir()
    found = mistakes("include 'latin.gin'\ninclude 'sub'\n")
    assert "'latin.gin' cannot be read: it is not UTF-8 text" in found[0]
    assert "'sub' cannot be read: Is a directory" in found[1]


def test_a_circle_of_includes_is_shown_whole(write, mistakes):
    write("a.gin", "include 'sub/b.gin'")
    write("sub/b.gin", "\ninclude 'a.gin'")
    assert mistakes("include 'a.gin'") == [
        "sub/b.gin:2: circular include: a.gin → sub/b.gin → a.gin.",
    ]


DEEP = {
    "macros": (
        "\n".join(f"M{n} = %M{n + 1}" for n in range(3000)) + "\nM3000 = 3\nTrain.extra = %M0",
        "deep within each",
    ),
    "lists in macros": (
        "\n".join(f"M{n} = [%M{n + 1}]" for n in range(900)) + "\nTrain.extra = %M0",
        "deep within each",
    ),
    "macros that double": (
        "\n".join(f"M{n} = [%M{n + 1}, %M{n + 1}]" for n in range(40)) + "\nM40 = 3\nTrain.extra = %M0",
        "more than 100,000 values",
    ),
    "lists": (f"Train.extra = {'[' * 5000}{']' * 5000}", "cannot read `Train.extra"),
    "dicts": (f"Train.extra = {'{1: ' * 5000}2{'}' * 5000}", "cannot read `Train.extra"),
    "signs": (f"Train.steps = {'-' * 5000}2", "cannot read `Train.steps"),
    "digits": (f"Train.steps = {'9' * 5000}", "cannot read `Train.steps"),
    "a null byte": ("Train.steps = 3\0", "cannot read `Train.steps"),
}


@pytest.mark.parametrize(("text", "expected"), DEEP.values(), ids=DEEP.keys())
def test_what_is_too_deep_or_too_large_is_a_mistake_with_its_place(mistakes, text, expected):
    found = mistakes(GOOD + text)
    assert re.match(r"main\.gin:\d+: ", found[0])
    assert expected in found[0]


def test_a_thousand_nested_includes_are_a_mistake_with_its_place(write, mistakes):
    for n in range(1000):
        write(f"a{n}.gin", f"include 'a{n + 1}.gin'")
    assert mistakes("include 'a0.gin'\n" + GOOD) == [
        "a99.gin:1: 'a100.gin' is not read: includes are more than 100 deep within each other."
    ]


def test_chains_that_a_person_may_write_are_read(write, resolved):
    write("a50.gin", GOOD)
    for n in range(50):
        write(f"a{n}.gin", f"include 'a{n + 1}.gin'\nM{n} = %M{n + 1}")
    assert resolved("include 'a0.gin'\nM50 = 7\nTrain.steps = %M0").tree.steps == 7


ENDINGS = {
    "import sys; sys.exit()": "SystemExit",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "raise SystemExit('bye')": "SystemExit: bye",
    "class Own(BaseException): pass\nraise Own('x')": "Own: x",
    "raise GeneratorExit": "GeneratorExit",
    "def f(): return f()\nf()": "RecursionError",
    "__all__ = ['nothing']": "has no attribute 'nothing'",
    "__all__ = 5": "not iterable",
    "__all__ = [5]": "must be string",
}


@pytest.mark.parametrize(("module", "expected"), ENDINGS.items())
def test_a_module_that_ends_the_process_or_offers_what_it_lacks_is_named(write, mistakes, module, expected):
    write("ending_model.py", module)
    (message,) = mistakes("import ending_model\n" + GOOD)
    assert message.startswith("main.gin:1: ")
    assert "ending_model" in message
    assert expected in message


def test_a_module_that_fails_is_named_with_the_line_that_failed(write, mistakes):
    write("broken_model.py", "x = 1\ny = x / 0\n")
    write("unreadable_model.py", "x = 1\ndef f(:\n")
    found = mistakes("import broken_model\nimport unreadable_model\n")
    assert re.search(r"main.gin:1: importing 'broken_model' failed at .*broken_model.py:2: ZeroDivisionError", found[0])
    assert re.search(r"main.gin:2: importing 'unreadable_model' failed at .*_model.py:2: SyntaxError", found[1])


def test_a_class_that_cannot_be_configured_says_why(write, mistakes):
    write("mine.py", "from dataclasses import dataclass\n@dataclass\nclass Soft:\n  x: int\nclass Plain:\n  pass\n")
    soft, plain = mistakes(GOOD + "import mine\nSoft.x = 1\nTrain.extra = @Plain()\n")
    assert "main.gin:7: Soft.x: Soft is not a frozen dataclass: put @dataclass(frozen=True) above it." in soft
    assert "main.gin:8: Plain is not a frozen dataclass" in plain


def test_a_name_that_two_modules_have_must_be_written_longer(write, mistakes):
    write("mine.py", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Net:\n  layers: int\n")
    found = mistakes(GOOD + "import mine\n")
    assert "main.gin:3: Net.layers: 'Net' is ambiguous: write mine.Net or toy_house.Net." in found[1]


def test_what_an_included_file_offers_need_not_be_used(write, resolved):
    write("offer.gin", "MACRO = 3\nbig/Net.layers = 2\nSources.weight = 2\nTrain.steps = %OTHER\n")
    assert resolved("include 'offer.gin'\n" + GOOD + "Train.steps = 3\nData.sources = []").tree.steps == 3


def test_the_error_of_an_object_points_at_the_last_binding_of_a_field_that_it_names(mistakes):
    (message,) = mistakes(GOOD + "Layout.mesh = {}\nLayout.zero = -1\nLayout.auto = True")
    assert message.startswith("main.gin:7: Layout: zero is -1")
    (message,) = mistakes(GOOD + "Layout.zero = 1\nLayout.auto = True", "Layout.zero=-2")
    assert message.startswith("--set: Layout: zero is -2")


def test_an_error_that_names_its_class_is_not_given_the_name_again(write, mistakes):
    write(
        "mine.py",
        "from dataclasses import dataclass\nfrom toy_house import Net\n@dataclass(frozen=True)\nclass Own(Net):\n"
        + CHECK,
    )
    (message,) = mistakes(GOOD + "import mine\nTrain.extra = @Own()\nOwn.layers = 1\nOwn.kind = 'plain'")
    assert message == "main.gin:9: Own needs luck"


CHECK = "  def __post_init__(self):\n    raise ValueError('Own needs luck')\n"
