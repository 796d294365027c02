"""What bindings build: macros, references, scopes, defaults, overrides, and the origin of each value."""

from pathlib import Path

import pytest
import toy_house
from toy_house import Bpe, Cosine, Data, Layout, Net, Optimizer, Sources, Train

from axon.config import load

BASE = """Train.model = @Net()
Train.data = @Data()
Net.layers = 6
Data.seq = 16
Data.batch = 8
"""
TREE = Train(model=Net(layers=6), data=Data(seq=16, batch=8))


def test_a_file_builds_the_tree_that_python_builds_by_hand(resolved):
    assert resolved(BASE).tree == TREE


def test_values_are_fitted_to_their_annotations(resolved):
    text = "Optimizer.betas = [1, 0.5]\nData.folder = 'a/b'\nLayout.rows = {'a': ['x', 'y'], 'b': 'x', 'c': None}"
    tree = resolved(BASE + text).tree
    assert tree.optimizer.betas == (1.0, 0.5)
    assert type(tree.optimizer.betas[0]) is float
    assert tree.data.folder == Path("a/b")
    assert tree.layout == Layout(rows={"a": ("x", "y"), "b": "x", "c": None})


def test_a_block_binds_like_single_lines(resolved):
    block = "Net:\n  layers = 6\n  # a comment\n\n  kind = 'gated'\nTrain.steps = 4\n"
    assert resolved(BASE + block).tree == resolved(BASE + "Net.kind = 'gated'\nTrain.steps = 4\n").tree


def test_a_macro_stands_for_its_last_value_wherever_it_is_used(resolved):
    tree = resolved("A = 2\nB = [%A, {'k': %A}]\nTrain.extra = %B\n" + BASE + "Train.steps = %A\nA = 3").tree
    assert (tree.steps, tree.extra) == (3, [3, {"k": 3}])


def test_a_reference_is_the_class_or_function_and_with_brackets_what_it_makes(resolved):
    tree = resolved(BASE + "Train.block = @Net\nTrain.transform = @doubled\nTrain.extra = @Bpe()").tree
    assert (tree.block, tree.transform, tree.extra) == (Net, toy_house.doubled, Bpe())


def test_a_function_is_called_with_its_bindings_and_checked_like_a_class(resolved, mistakes):
    assert resolved(BASE + "Layout.rows = @zero()\nzero.stage = 1").tree.layout.rows == {"embed": "data"}
    unbound, wrong = mistakes(BASE + "Layout.rows = @zero()\nzero.axis = 3\n")
    assert "main.gin:6: zero.stage (int) has no value" in unbound
    assert "main.gin:7: zero.axis: expected str, got 3." in wrong


def test_to_what_a_function_makes_the_bindings_of_its_class_apply_and_the_rest_says_where_it_is_from(
    resolved, mistakes
):
    text = "Train.model = @taken()\nTrain.data = @Data()\nData.seq = 16\nData.batch = 8\ntaken.layers = 6\n"
    made = resolved(text + "Net.kind = 'gated'")
    assert made.tree.model == Net(6, "gated")
    assert made.origins["Net.layers"] == "taken()"
    assert made.origins["Net.kind"] == "main.gin:6"
    (wrong,) = mistakes(text + "Net.kinds = 'gated'")
    assert "main.gin:6" in wrong
    assert "kind" in wrong


def test_a_scope_starts_from_the_bindings_without_scope_and_overrides_them(resolved):
    text = "Train.teacher = @big/Net()\nbig/Net.layers = 60\nNet.kind = 'gated'\n"
    tree = resolved(BASE + text).tree
    assert (tree.model, tree.teacher) == (Net(6, "gated"), Net(60, "gated"))


def test_an_object_inside_a_scopes_object_is_built_in_that_scope_unless_its_reference_names_another(resolved):
    text = "Train.teacher = @a/Net()\na/Net.inner = @b/Net()\nb/Net.inner = None\na/Net.layers = 1\nb/Net.layers = 2\n"
    assert resolved(BASE + text).tree.teacher == Net(1, inner=Net(2))
    text = "Train.optimizer = @slow/Optimizer()\nslow/Optimizer.schedule = @Cosine()\nslow/Cosine.warmup = 99\n"
    assert resolved(BASE + text).tree.optimizer == Optimizer(Cosine(warmup=99))


def test_a_scope_may_lie_in_a_scope(resolved):
    text = "Train.teacher = @a/b/Net()\na/Net.layers = 1\na/b/Net.kind = 'gated'\n"
    assert resolved(BASE + text).tree.teacher == Net(1, "gated")


def test_what_is_bound_for_a_class_holds_for_an_object_that_is_a_default(resolved):
    tree = resolved(BASE + "Layout.zero = 3\nCosine.peak = 0.5\nSources.weight = 2\n").tree
    assert tree.layout == Layout(zero=3)
    assert tree.optimizer == Optimizer(Cosine(peak=0.5))
    assert tree.data.sources == (Sources("text", 2.0),)


def test_a_later_binding_overrides_an_earlier_one_and_set_overrides_all(resolved):
    assert resolved(BASE + "Train.steps = 1\nTrain.steps = 2").tree.steps == 2
    assert resolved(BASE + "Train.steps = 1", "Train.steps=3", "Train.steps = 4").tree.steps == 4
    assert resolved("N = 1\nTrain.steps = %N\n" + BASE, "N=5").tree.steps == 5
    assert resolved(BASE, "Layout.mesh={'data': 4, 'tensor': 2}").tree.layout.mesh == {"data": 4, "tensor": 2}


def test_required_is_no_mistake_once_someone_gives_the_value(write, resolved):
    write("base.gin", BASE + "STEPS = %REQUIRED\nTrain.steps = %STEPS\nNet.kind = %gin.REQUIRED\n")
    tree = resolved("include 'base.gin'\nSTEPS = 7", "Net.kind='gated'").tree
    assert (tree.steps, tree.model) == (7, Net(6, "gated"))


def test_an_include_is_searched_for_in_its_folder_then_in_the_working_directory(write, resolved):
    write("sub/a.gin", "include 'b.gin'\ninclude 'c.gin'\n")
    write("sub/b.gin", BASE)
    write("b.gin", "Train.steps = 'not this one'")
    write("c.gin", "Train.steps = 12\n")
    result = resolved("include 'sub/a.gin'\nNet.layers = 7")
    assert (result.tree.steps, result.tree.model) == (12, Net(7))
    assert result.origins["Train.steps"] == "c.gin:1"
    assert result.origins["Data.seq"] == "sub/b.gin:4"


def test_a_file_may_be_included_twice(write, resolved):
    write("base.gin", BASE)
    assert resolved("include 'base.gin'\ninclude 'base.gin'").tree == TREE


def test_each_value_says_where_it_was_written(resolved):
    origins = resolved(
        BASE + "N = 3\nTrain.steps = %N\nNet.kind = 'plain'\nLayout.rows = @zero()\nzero.stage = 1\nCosine.peak = 1",
        "Net.layers=8",
    ).origins
    assert origins["Net.layers"] == "--set"
    assert origins["Net.kind"] == "main.gin:8"
    assert origins["Net.inner"] == origins["Layout.zero"] == origins["Cosine.warmup"] == "default"
    assert origins["Train.steps"] == "main.gin:7, %N main.gin:6"
    assert origins["Layout.rows"] == "main.gin:9"
    assert origins["Cosine.peak"] == "main.gin:11"


def test_the_lines_are_the_text_with_each_origin(resolved):
    result = resolved(BASE, "Layout.mesh={" + ", ".join(f"'axis_{n}': {n}" for n in range(12)) + "}")
    assert [line.partition("  #")[0].rstrip() for line in result.lines] == result.text.rstrip("\n").split("\n")
    assert any(line.startswith("Net.layers = 6 ") and line.endswith("  # main.gin:3") for line in result.lines)
    assert "}" + " " * 49 + "# --set" in result.lines


def test_loading_twice_gives_equal_trees_and_leaves_nothing_behind(resolved):
    assert resolved(BASE, "Net.layers=2").tree.model == Net(2)
    assert resolved(BASE).tree == TREE


def test_the_root_is_a_parameter(write):
    write("net.gin", "Net.layers = 2")
    assert load("net.gin", modules=("toy_house",), root="Net").tree == Net(2)


@pytest.mark.parametrize("path", ["main.gin", "./main.gin", "sub/../main.gin"])
def test_origins_name_the_file_from_the_working_directory(folder, write, path):
    write("main.gin", BASE)
    write("sub/x.gin", "")
    for given in (path, folder / path):
        origin = load(given, modules=("toy_house",)).origins["Net.layers"]
        assert origin == "main.gin:3" if "sub" not in path else origin.endswith("main.gin:3")
