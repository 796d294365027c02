"""What a person reads when two trees differ, and what fields declare."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon.disk import check_paths
from axon.errors import UserError
from axon.fields import RESUMABLE, FilePath, Location, differences, differs_by_machine, may_change


@dataclass(frozen=True)
class Net:
    layers: int
    remat: str = field(default="none", metadata=RESUMABLE)


@dataclass(frozen=True)
class Text:
    path: FilePath
    weight: float = 1.0

    def __post_init__(self):
        check_paths(self)


@dataclass(frozen=True)
class Tree:
    model: Any
    sources: tuple[Text, ...] = (Text("text"),)
    parts: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": -1}, metadata=RESUMABLE)
    folder: Location | None = None
    steps: int = 100

    def __post_init__(self):
        check_paths(self)


TREE = Tree(Net(6))


def test_equal_trees_have_no_differences():
    assert differences(TREE, Tree(Net(6))) == []


def test_each_differing_field_is_one_line_in_the_order_of_the_fields():
    new = replace(TREE, model=Net(8), sources=(Text("text", 0.5),), steps=3)
    assert differences(TREE, new) == ["model.layers: 6 → 8", "sources[0].weight: 1.0 → 0.5", "steps: 100 → 3"]


def test_an_object_of_another_class_or_a_tuple_of_another_length_is_one_difference():
    assert differences(TREE, replace(TREE, model=Text("x"), sources=(), parts={"a": Net(1)})) == [
        "model: @Net() → @Text()",
        "sources: (@Text(),) → ()",
        "parts: {} → {'a': @Net()}",
    ]


def test_classes_of_one_name_are_told_apart_by_their_modules():
    other = type("Net", (Net,), {"__module__": "elsewhere", "__qualname__": "Net"})
    (line,) = differences(TREE, replace(TREE, model=other(6)))
    assert line.endswith("→ @elsewhere.Net()")


def test_objects_in_containers_are_compared_field_by_field_however_deep():
    nested = [replace(TREE, parts={"a": ((Net(layers),), 1)}) for layers in (1, 2)]
    assert differences(*nested) == ["parts['a'][0][0].layers: 1 → 2"]


def test_the_order_of_a_mapping_and_the_kind_of_a_sequence_are_no_difference():
    assert differences(replace(TREE, parts={"a": [1], "b": 2}), replace(TREE, parts={"b": 2, "a": (1,)})) == []


def test_what_may_change_is_declared_at_the_field_and_ignored_with_all_that_it_holds():
    new = Tree(Net(6, "full"), (Text("moved"),), mesh={"tensor": 2}, folder="elsewhere")
    assert differences(TREE, new, may_change) == ["folder: None → 'elsewhere'"]
    assert [line.partition(":")[0] for line in differences(TREE, new, differs_by_machine)] == ["model.remat", "mesh"]


@given(*[st.builds(Tree, st.builds(Net, st.integers(0, 2)), steps=st.integers(0, 2))] * 2)
def test_two_trees_are_equal_exactly_if_they_have_no_differences(one, other):
    assert (one == other) == (differences(one, other) == [])


def test_a_path_has_the_home_folder_and_variables_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert Text("~/a").path == Text("$HOME/a").path == Text("${HOME}/a").path == f"{tmp_path}/a"
    assert Tree(Net(1), folder="$SCRATCH/x").folder == "/scratch/me/x"
    assert Tree(Net(1), folder="s3://bucket/~/x").folder == "s3://bucket/~/x"
    assert Text("some/relative").path == "some/relative"


@pytest.mark.parametrize("path", ["$NOT_SET_HERE/x", "~nobody-of-that-name/x", "", "a\0b", "s3://bucket/x"])
def test_what_is_no_path_is_refused_by_class_and_field(path):
    with pytest.raises(UserError, match=r"^Text\.path is "):
        Text(path)


def test_a_file_with_a_dollar_in_its_name_is_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "US$rates.txt").touch()
    assert Text("US$rates.txt").path == "US$rates.txt"
