"""Paths on the command line."""

from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer

from axon.cli import app
from axon.commands import checkpoint
from axon.commands.paths import named_paths, path
from axon.config import ConfigError, load
from axon.errors import UserError


def test_every_path_of_every_command_has_home_and_variables_replaced():
    commands = [*app.registered_commands, *checkpoint.app.registered_commands]
    hints = [hint for one in commands for hint in get_type_hints(one.callback, include_extras=True).values()]
    of_paths = [hint for hint in hints if get_origin(hint) is Annotated and "Path" in str(get_args(hint)[0])]
    assert len(of_paths) >= 10
    assert all(hint.__metadata__[0].parser is path for hint in of_paths)


def test_a_path_is_expanded_and_as_relative_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path("~/a.png") == path("$HOME/a.png") == tmp_path / "a.png"
    assert path("a/b.png") == Path("a/b.png")
    with pytest.raises(typer.BadParameter, match=r"'\$NOT_SET_HERE/a', and the environment variable NOT_SET_HERE"):
        path("$NOT_SET_HERE/a")


def test_an_included_file_may_be_named_from_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.gin").write_text((Path(__file__).parents[1] / "tiny.gin").read_text())
    (tmp_path / "mine.gin").write_text("include '~/base.gin'\nTrain.run_dir = '$HOME/runs/x'\n")
    assert load(tmp_path / "mine.gin").tree.run_dir == f"{tmp_path}/runs/x"
    (tmp_path / "mine.gin").write_text("include '$NOT_SET_HERE/base.gin'\n")
    with pytest.raises(ConfigError, match="NOT_SET_HERE is not set"):
        load(tmp_path / "mine.gin")


def test_names_with_paths_have_one_of_each():
    assert named_paths(["a=x/y", "b=hf:me/b=c"], "--adapter") == {"a": "x/y", "b": "hf:me/b=c"}
    for wrong, said in {("a",): "'a'", ("=x",): "'=x'", ("a=",): "'a='", ("a=x", "a=y"): "'a' twice"}.items():
        with pytest.raises(UserError, match=f"--adapter .*{said}"):
            named_paths(wrong, "--adapter")
