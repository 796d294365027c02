"""The names a file may use: Axon's own, and those of the modules it imports."""

import pytest
from toy_house import Data

from axon.config import dump, load
from axon.config.names import Names

MINE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Mine:
    layers: int
    width: float = 1.0
"""
TEXT = "Train.model = @Mine()\nTrain.data = @Data()\nMine.layers = 3\nData:\n  seq = 4\n  batch = 2\n"


@pytest.mark.parametrize("line", ["import mine", "from mine import Mine"])
def test_a_persons_own_module_needs_only_an_import_line(write, resolved, line):
    write("mine.py", MINE)
    tree = resolved(f"{line}\n{TEXT}").tree
    assert (type(tree.model).__module__, tree.model.layers, tree.data) == ("mine", 3, Data(4, 2))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import house.mine", "house.mine.Mine"),
        ("import house.mine", "mine.Mine"),
        ("from house import mine", "Mine"),
        ("import house.mine as m", "m.Mine"),
        ("from house import mine as m", "m.Mine"),
        ("from house.mine import Mine as M", "M"),
        ("from house import Mine", "house.Mine"),
    ],
)
def test_a_module_in_a_package_is_imported_in_every_way_that_gin_knows(write, resolved, line, name):
    write("house/__init__.py", "from house.mine import Mine\n")
    write("house/mine.py", MINE)
    assert resolved(f"{line}\n{TEXT.replace('Mine', name)}").tree.model.layers == 3


def test_without_the_import_line_the_name_is_unknown(write, mistakes):
    write("mine.py", MINE)
    assert any("unknown name 'Mine'" in message for message in mistakes(TEXT))


def test_the_names_of_an_included_files_imports_can_be_used(write, resolved):
    write("mine.py", MINE)
    write("sub/base.gin", "import mine\n" + TEXT)
    assert resolved("include 'sub/base.gin'\nMine.layers = 9\n").tree.model.layers == 9


def test_all_decides_what_a_module_offers(write):
    write("listed.py", "__all__ = ['f']\ndef f(): ...\ndef g(): ...\n")
    write(
        "unlisted.py",
        "from dataclasses import dataclass, field\nfrom toy_house import *\ndef f(): ...\ndef _g(): ...\n",
    )
    Names(()).import_all([])  # makes the working directory importable
    assert Names(("listed",)).known() == {"f"}
    assert Names(("unlisted",)).known() >= {"f", "Data", "Train"}
    assert not Names(("unlisted",)).known() & {"_g", "dataclass", "field", "zero"}


def test_a_class_that_shares_its_name_with_one_of_axons_is_written_with_an_alias(write, resolved):
    write("other.py", MINE.replace("class Mine", "class Net"))
    text = TEXT.replace("Mine", "other.Net")
    result = resolved(f"import other\n{text}Train.teacher = @toy_house.Net()\ntoy_house.Net.layers = 2\n")
    assert "from other import Net as other_Net\n" in result.text
    assert "other_Net.layers = 3\n" in result.text
    assert resolved(result.text).tree == result.tree


def test_a_dump_imports_what_is_not_axons_own(write, resolved):
    write("mine.py", MINE)
    result = resolved("import mine\n" + TEXT)
    assert result.text.startswith("from mine import Mine\n\nTrain.model = @Mine()\n")
    assert dump(result.tree, modules=("toy_house",)) == result.text
    write("again.gin", result.text)
    assert load("again.gin", modules=("toy_house",)).tree == result.tree
