"""A working directory for configuration files, and `load` for the toy house."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon.config import ConfigError, Resolved, load

TOY = "toy_house"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; what a test imports from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def write(folder: Path) -> Callable[..., None]:
    """write("a.gin", text) writes a file in the working directory."""

    def to_file(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    return to_file


@pytest.fixture
def resolved(write) -> Callable[..., Resolved]:
    """resolved(text, *overrides): `text` as main.gin, loaded."""

    def from_text(text: str, *overrides: str) -> Resolved:
        write("main.gin", text)
        return load("main.gin", overrides, modules=(TOY,))

    return from_text


@pytest.fixture
def mistakes(resolved) -> Callable[..., list[str]]:
    """mistakes(text, *overrides): all that is wrong with `text` as main.gin."""

    def of_text(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            resolved(text, *overrides)
        return [str(mistake) for mistake in caught.value.mistakes]

    return of_text
