"""The place in a person's own code that an error is told with."""

import importlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from axon.axes import PatternError, einsum
from axon.errors import UserError
from axon.layout import Layout
from axon.own_code import at_own_code, in_own_code, written_at
from models.llama import Llama


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """mine(text): a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(text):
        (tmp_path / "mine.py").write_text(text)
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        return importlib.import_module("mine")

    yield write
    sys.modules.pop("mine", None)


def raised(fn, *arguments):
    """What `fn` raises, its traceback beginning below this file."""
    try:
        fn(*arguments)
    except Exception as caught:
        error = caught
    else:
        pytest.fail("nothing was raised")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return error.with_traceback(frames)


def test_an_error_in_own_code_is_told_with_the_line(mine):
    module = mine("def build():\n    return missing\n")
    assert (in_own_code(raised(module.build)) or "").startswith(
        "mine.py:2 in build: NameError: name 'missing' is not defined\n    return missing\n"
    )


def test_of_several_own_lines_the_innermost_is_told_that_called_what_failed(mine):
    text = "def outer(f):\n    return inner(f)\n\ndef inner(f):\n    return f('a b')\n"
    error = raised(mine(text).outer, lambda pattern: einsum(pattern, jnp.ones(1), jnp.ones(1)))
    assert isinstance(error, PatternError)
    (here,) = re.findall(r"^(\S+):\d+ in <lambda>", in_own_code(error) or "")
    assert here.endswith("test_own_code.py"), "a test is nobody else's code"
    error = raised(mine("import axon.axes\ndef f():\n    axon.axes.einsum('a b', 1, 2)\n").f)
    assert "mine.py:3 in f: PatternError" in (in_own_code(error) or "")


def test_an_error_of_axons_or_of_a_library_has_no_place():
    assert in_own_code(raised(einsum, "a b", jnp.ones(1), jnp.ones(1))) is None
    assert in_own_code(raised(Llama, 1, 2, 3, 0, 5, 6)) is None
    assert in_own_code(raised(jnp.zeros, "x")) is None
    assert in_own_code(raised(subprocess.check_output, ["false"])) is None
    assert at_own_code(raised(Layout, {"dta": 1})) == ""


def test_an_error_in_what_jax_makes_of_own_code_is_told_with_the_line_that_it_was_made_of(mine):
    text = """
import jax

@jax.custom_vjp
def double(x):
    return 2 * x

double.defvjp(lambda x: (2 * x, None), lambda _, g: (g, g))

def loss(x):
    return double(x).sum()
"""
    error = raised(jax.grad(mine(text).loss), jnp.ones(3))
    assert re.match(r"mine\.py:\d+ in loss: \w+Error: ", in_own_code(error) or "")


def test_what_a_person_wrote_is_named_by_its_first_line(mine):
    module = mine("\n\nclass Block:\n    pass\n")
    assert written_at(module.Block) == "mine.py:3"
    assert written_at(int) == "int"


def test_an_error_of_axons_own_words_is_followed_by_the_place(mine):
    module = mine("def build(error):\n    raise error('axis wrong')\n")
    assert at_own_code(raised(module.build, UserError)) == ("\n  at mine.py:2 in build\n    raise error('axis wrong')")
