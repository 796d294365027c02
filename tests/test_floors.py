"""Who may know whom: no room imports one above it, no file is in a circle, and the ground floors need little."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {
        *("errors", "checks", "composition", "disk", "fields", "object_store", "own_code"),
        *("signed_json", "foreign_json", "model_config", "path_patterns"),
    },
    {"axes", "chips"},
    {"layout"},
    {"kernels", "precision"},
    {"parallel"},
    {"nn"},
    {"models", "runtime"},
    {"train", "checkpoint", "data"},
    {"plan", "serve", "launch", "observe"},
    {"tune"},
    {"config", "run", "show", "bench"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""The rooms, ground floor first; a room may import its own floor and those below."""

PRIVATE = (
    "jax._src.distributed",
    "jax._src.cudnn",
    "jax.experimental.layout",
    "orbax.checkpoint.experimental",
    "gin.",
)
"""Interfaces of others that are private or experimental: one module each may know them."""

BARE = ("axon.axes", "axon.layout", "axon.nn", "axon.kernels", "axon.parallel", "axon.precision", "axon.train.step")
NEEDED = {"jax", "jaxlib", "flax", "optax", "einops", "numpy", "axon"}


def modules():
    """Name of each module → its file."""
    files = [*ROOT.glob("axon/**/*.py"), *ROOT.glob("models/*.py"), *ROOT.glob("scripts/bench/**/*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported(path: Path) -> set[str]:
    """Every name that a file imports, `from a import b` as `a.b` and as `a`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


MODULES = modules()


@cache
def imports() -> dict[str, set[str]]:
    """Each module → the names that it imports; read once, and not while tests are collected."""
    return {name: imported(path) for name, path in MODULES.items()}


def own() -> dict[str, set[str]]:
    """Each module → the modules of this project that it imports."""
    return {name: {other for other in found if other in MODULES and other != name} for name, found in imports().items()}


def floor(module: str) -> int:
    room = module.removeprefix("axon.").removeprefix("scripts.").split(".")[0]
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def test_every_room_has_a_floor():
    for module in MODULES.keys() - {"axon"}:
        assert floor(module) >= 0, module


def test_nobody_imports_upward():
    pairs = [(a, b) for a, others in own().items() if a != "axon" for b in others - {"axon"}]
    upward = [f"{a} imports {b}" for a, b in pairs if floor(b) > floor(a)]
    assert not upward


def test_no_file_takes_part_in_a_circle():
    # A package's own name stands for its `__init__`, which its files do not need.
    graph = {a: {b for b in others if not a.startswith(f"{b}.")} for a, others in own().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_a_private_or_experimental_interface_stands_behind_one_module():
    for private in PRIVATE:
        users = [name for name, found in imports().items() if any(f"{one}.".startswith(private) for one in found)]
        assert len(users) == 1, (private, users)
        assert any(char.isdigit() for char in ast.get_docstring(ast.parse(MODULES[users[0]].read_text())) or ""), (
            f"{users[0]} names the version of {private} that it was written for"
        )


def test_what_a_step_is_made_of_needs_only_jax_flax_optax_and_einops():
    code = f"""
import sys
before = set(sys.modules)
import jax, flax.nnx, optax, einops
theirs = set(sys.modules)
import importlib
for name in {BARE!r}: importlib.import_module(name)
print(*sorted({{m.split(".")[0] for m in set(sys.modules) - theirs - set(sys.stdlib_module_names)}}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    third_party = {m for m in ran.stdout.split() if not m.startswith("_") and m not in sys.stdlib_module_names}
    assert third_party <= NEEDED, third_party - NEEDED
