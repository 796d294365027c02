"""Every option of every command, with values that are none: each gets one message that names it, and exit code 2."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import axon.run
import axon.run.profiled
from axon.cli import app
from axon.errors import UserError

WRONG = {
    int: ("many", "", "1.5", "nan"),
    float: ("many", "", "nan", "inf"),
    Path: ("", "$NOT_SET_HERE/x", "a\0b"),
    str: (),
}
ODD = ("", "\udcff", "a\0b", "$NOT_SET_HERE", "x" * 300, str(10**20))
"""Values that may be right: they end with 0 or 2."""
OTHERS = {"generate": ["--prompt=x"], "compile": ["--on=v5e:1x1"]}


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Words of the command, whole command line without the option, option."""
    for name, one in getattr(command, "commands", {}).items():
        yield from options(one, (*path, name))
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    values = ["tiny.gin" if one.name == "config" else "nosuch" for one in arguments]
    for one in command.params:
        if path and one.param_type_name == "option" and one.type_descriptor.annotation is not bool:
            yield pytest.param([*path, *values, *OTHERS.get(path[0], ())], one, id=f"{' '.join(path)} {one.opts[0]}")


@pytest.mark.parametrize(("line", "option"), list(options(get_command(app))))
def test_a_value_that_is_none_is_refused_by_the_options_name(line, option, tmp_path, monkeypatch):
    shutil.copy(Path(__file__).parents[1] / "tiny.gin", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(axon.run, "run", lambda *_, **__: None)
    monkeypatch.setattr(axon.run.profiled, "profiled", lambda *_: tmp_path)
    kind, name = option.type_descriptor.annotation, option.opts[0].removeprefix("--").replace("-", "[-_ ]")
    wrong = ["nonsense"] if get_args(kind) and kind != list[str] else [*WRONG[str if kind == list[str] else kind]]
    for value in wrong + ([] if option.min is None else [str(option.min - 1)]):
        code, said = run(*line, f"{option.opts[0]}={value}")
        assert (code, bool(re.search(name, said))) == (2, True), (value, said)
    for value in ODD:
        if option.name not in (
            "processes",
            "restarts",
            "tasks",
        ):  # which start processes, and read a harness's thousands of tasks
            assert run(*line, f"{option.opts[0]}={value}")[0] in (0, 2), value


def run(*arguments: str) -> tuple[int, str]:
    """The exit code, and the message. Raises what would be a traceback."""
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, UserError):
        return 2, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output
