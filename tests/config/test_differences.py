"""What a person reads when two trees differ."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from toy_house import Bpe, Data, Layout, Net, Sources, Train

from axon.config import differences

TREE = Train(model=Net(6), data=Data(16, 8))


def test_equal_trees_have_no_differences():
    assert differences(TREE, Train(model=Net(6), data=Data(16, 8))) == []


def test_each_differing_field_is_one_line_in_the_order_of_the_fields():
    new = replace(TREE, model=Net(8), data=Data(16, 4, tokenizer=Bpe(9)), steps=3)
    assert differences(TREE, new) == [
        "model.layers: 6 → 8",
        "data.batch: 8 → 4",
        "data.tokenizer.vocab: 256 → 9",
        "steps: 100 → 3",
    ]


def test_an_object_of_another_class_or_a_tuple_of_another_length_is_one_difference():
    new = replace(TREE, model=Bpe(), data=Data(16, 8, ()), teacher=Net(1))
    assert differences(TREE, new) == [
        "model: @Net() → @Bpe()",
        "data.sources: (Sources(path='text', weight=1.0),) → ()",
        "teacher: None → @Net()",
    ]


def test_tuples_and_mappings_of_one_shape_are_compared_item_by_item():
    new = replace(TREE, data=Data(16, 8, (Sources("other"),)), layout=Layout(mesh={"data": 4}))
    assert differences(TREE, new) == ["data.sources[0].path: 'text' → 'other'", "layout.mesh['data']: -1 → 4"]
    wider = replace(TREE, layout=Layout(mesh={"data": -1, "tensor": 2}))
    assert differences(TREE, wider) == ["layout.mesh: {'data': -1} → {'data': -1, 'tensor': 2}"]


def test_ignored_fields_may_differ_with_all_that_they_hold():
    new = replace(TREE, layout=Layout(zero=3), steps=5, data=Data(16, 4, folder=None, tokenizer=Bpe(1)))
    assert differences(TREE, new, ignore=("layout", "steps", "data.batch")) == ["data.tokenizer.vocab: 256 → 1"]


@given(*[st.builds(Train, st.builds(Net, st.integers(0, 2)), st.just(TREE.data), steps=st.integers(0, 2))] * 2)
def test_two_trees_are_equal_exactly_if_they_have_no_differences(one, other):
    assert (one == other) == (differences(one, other) == [])
