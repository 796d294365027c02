"""A tree as text: the golden text, and that it reads back to an equal tree."""

import math
import tempfile
from pathlib import Path

import pytest
import toy_house
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_house import Bpe, Cosine, Data, Layout, Net, Optimizer, Sources, Train

from axon.config import ConfigError, dump, load

GOLDEN = """\
Train.model = @model/Net()
Train.data = @Data()
Train.layout = @Layout()
Train.optimizer = @Optimizer()
Train.steps = 7
Train.teacher = @teacher/Net()
Train.transform = @doubled
Train.block = @Net
Train.extra = -1e999

model/Net.layers = 2
model/Net.kind = 'plain'
model/Net.inner = None

Data.seq = 16
Data.batch = 8
Data.sources = (@data_sources_0/Sources(), @data_sources_1/Sources(), @data_sources_0/Sources())
Data.tokenizer = @Bpe()
Data.folder = 'a/b'

data_sources_0/Sources.path = "it's"
data_sources_0/Sources.weight = 1.0

data_sources_1/Sources.path = 'b'
data_sources_1/Sources.weight = 0.5

Bpe.vocab = 256

Layout.mesh = {'data': 4, 'tensor': 2}
Layout.rows = {
    'batch': 'data',
    'heads': 'tensor',
    'kv_heads': None,
    'seq.residual': ('context', 'tensor'),
    'vocab': ('tensor',),
    'embed': (
        'an_axis_with_a_very_long_name',
        'another_axis_with_a_very_long_name',
        'a_third_axis_with_a_long_name',
    ),
}
Layout.zero = 0
Layout.auto = False

Optimizer.schedule = @Cosine()
Optimizer.betas = (0.9, 0.95)

Cosine.peak = 0.0003
Cosine.warmup = 10

teacher/Net.layers = 3
teacher/Net.kind = 'gated'
teacher/Net.inner = @model/Net()
"""

ROWS = {
    "batch": "data",
    "heads": "tensor",
    "kv_heads": None,
    "seq.residual": ("context", "tensor"),
    "vocab": ("tensor",),
    "embed": (
        "an_axis_with_a_very_long_name",
        "another_axis_with_a_very_long_name",
        "a_third_axis_with_a_long_name",
    ),
}
TREE = Train(
    model=Net(2),
    data=Data(16, 8, (Sources("it's"), Sources("b", 0.5), Sources("it's")), folder=Path("a/b")),
    layout=Layout(mesh={"data": 4, "tensor": 2}, rows=ROWS),
    steps=7,
    teacher=Net(3, "gated", Net(2)),
    transform=toy_house.doubled,
    block=Net,
    extra=-math.inf,
)

words = st.text(max_size=8)
numbers = st.integers() | st.floats(allow_nan=False)
literals = st.recursive(
    st.none() | st.booleans() | words | numbers | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(words | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=8,
)
nets = st.recursive(
    st.builds(Net, st.integers(0, 2), st.sampled_from(["plain", "gated"])),
    lambda inner: st.builds(Net, st.integers(0, 2), inner=inner | st.none()),
    max_leaves=4,
)
rows = st.dictionaries(words, st.none() | words | st.lists(words, max_size=4).map(tuple), max_size=5)
floats = st.floats(allow_nan=False)
trees = st.builds(
    Train,
    model=nets,
    data=st.builds(
        Data,
        st.integers(),
        st.integers(),
        st.lists(st.builds(Sources, words, floats), max_size=3).map(tuple),
        st.builds(Bpe, st.integers()),
        st.none() | words.filter(lambda word: not {*"\0$~"} & {*word}).map(Path),
    ),
    layout=st.builds(Layout, st.dictionaries(words, st.integers(), max_size=3), rows, st.integers(0, 3), st.booleans()),
    optimizer=st.builds(Optimizer, st.builds(Cosine, floats, st.integers()), st.tuples(floats, floats)),
    steps=st.integers(),
    teacher=st.none() | nets | st.builds(Data, st.integers(0, 1), st.integers(0, 1)),
    transform=st.sampled_from([None, toy_house.doubled]),
    block=st.sampled_from([None, Net]),
    extra=literals
    | st.builds(Train, nets, st.builds(Data, st.integers(), st.integers()), extra=nets)
    | st.lists(nets | st.builds(Bpe), max_size=3)
    | st.dictionaries(words, nets, max_size=3),
)


def read_back(text: str):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.gin"
        path.write_text(text, encoding="utf-8")
        return load(path, modules=("toy_house",))


def test_the_text_of_a_tree_is_golden():
    assert dump(TREE, modules=("toy_house",)) == GOLDEN


def test_the_golden_text_builds_the_tree():
    assert read_back(GOLDEN).tree == TREE


@settings(max_examples=40)
@given(trees)
def test_every_tree_is_read_back_equal_from_its_text_with_an_origin_of_each_line_and_has_the_same_text_again(tree):
    text = dump(tree, modules=("toy_house",))
    again = read_back(text)
    assert again.tree == tree
    assert again.text == text
    assert all("config.gin:" in origin for origin in again.origins.values())


def local_function(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (math.nan, "extra: nan cannot be written"),
        (object(), "extra: a object (<object object at"),
        ({"k": [1, {2}]}, "extra['k'][1]: a set ({2}) cannot be written in a configuration file"),
        (lambda: 3, "extra: <lambda> can be written only if it is defined at the top level of its module"),
        (1j, "extra: a complex (1j) cannot be written"),
    ],
)
def test_what_no_text_can_stand_for_is_refused_with_its_place_in_the_tree(extra, message):
    with pytest.raises(ConfigError) as caught:
        dump(Train(Net(1), Data(1, 1), extra=extra), modules=("toy_house",))
    assert message in str(caught.value)


def test_a_function_of_any_module_is_imported():
    text = dump(Train(Net(1), Data(1, 1), transform=local_function), modules=("toy_house",))
    assert text.startswith(f"from {__name__} import local_function\n")
    assert "Train.transform = @local_function\n" in text
