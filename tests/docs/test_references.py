"""What the documentation names is there: files, and whatever has a dotted name."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

NOT_MODULES = {"models.py", "axon.models"}
"""What looks like a module's name: a file, and a group of entry points."""


def resolves(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_names_are_there(page):
    text = page.read_text()
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    assert not {link for link in links if not (page.parent / link).exists()}
    paths = re.findall(r"\b(?:axon|models|configs|tests|scripts|docs)/[\w./]*\w", text)
    assert not {path for path in paths if not list(ROOT.glob(f"{path}*"))}
    tests = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    assert not {(file, test) for file, test in tests if f"def {test}(" not in (ROOT / file).read_text()}
    names = set(re.findall(r"`(axon(?:\.\w+)+|models(?:\.\w+)+)", text)) - NOT_MODULES
    assert not {name for name in names if not resolves(name)}
