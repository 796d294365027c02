"""Small random texts, and a cache folder of each test's own."""

import random

import pytest

LETTERS = "abcdefghij \n\t.,éß漢字🙂\u200b"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("AXON_CACHE", str(folder))
    return folder


@pytest.fixture
def texts():
    """`texts(n)`: n random documents of up to 400 characters, no two alike."""

    def make(count: int) -> list[str]:
        return [f"{index} " + "".join(random.choices(LETTERS, k=random.randint(0, 400))) for index in range(count)]

    return make


@pytest.fixture
def folder(tmp_path, texts):
    """`folder(name, n)`: a folder of n random text files."""

    def make(name: str, count: int):
        path = tmp_path / name
        path.mkdir()
        for index, text in enumerate(texts(count)):
            (path / f"{index:04}.txt").write_bytes(f"{name} {text}".encode())
        return path

    return make
