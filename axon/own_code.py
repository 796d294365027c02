"""Errors raised inside the user's own code: a model file, a source, an optimizer.

On the command line such an error is reported as a mistake of theirs, with their file and line. From Python it is raised
as it is.
"""

import hashlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_AXON = Path(__file__).parent
_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_BESIDE = (_AXON.parent / "models", _AXON.parent / "scripts")
_NOT_OWN = (_AXON, *_BESIDE, *(Path(sysconfig.get_path(name)) for name in _PYTHON))
"""Folders of Axon's own code, of Python's and of what is installed."""

HINTS = {
    "ShardingTypeError": "Arrays are split over devices here: axon.axes.einsum multiplies them by name, moved to where "
    "they have to be, and axon.axes.shard places one"
}
"""Type of an error, of JAX or Python → a hint."""


def in_own_code(error: BaseException) -> str | None:
    """`mine.py:12 in build: AttributeError: …` and the line itself, if the user's code is in an error's traceback.

    Of several places the innermost, which called what failed.
    """
    frame = _innermost(error)
    if frame is None:
        return None
    kind = type(error).__name__
    place = f"{_named(frame.filename)}:{frame.lineno} in {frame.name}: {kind}: {error}\n    {frame.line}"
    own = "That is code of your own. AXON_TRACEBACK=1 shows every call"
    return "\n  ".join(filter(None, (place, HINTS.get(kind), own)))


def at_own_code(error: BaseException) -> str:
    """The place alone, as lines to append to an error's own message; empty where there is none."""
    frame = _innermost(error)
    return "" if frame is None else f"\n  at {_named(frame.filename)}:{frame.lineno} in {frame.name}\n    {frame.line}"


def written_at(target: Any) -> str:
    """`mine.py:12`, where a class or a function is defined; its name if it has no file."""
    try:
        return f"{_named(inspect.getfile(target))}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return target.__qualname__


def own_modules() -> dict[str, str]:
    """Name → digest of the file of each imported module of the user's own."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.copy().items()}
    return {name: _digest([Path(file)]) for name, file in sorted(files.items()) if file and _is_own(file)}


def axon_digest() -> str:
    """Of all of Axon's own code, and its models'."""
    return _digest([file for folder in (_AXON, _AXON.parent / "models") for file in sorted(folder.rglob("*.py"))])


def _digest(files: Sequence[Path]) -> str:
    content = hashlib.blake2b(digest_size=8)
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code, in the error's traceback, else in that of the error it was raised from.

    JAX puts the traceback of what it was transforming there.
    """
    for one in _chain(error):
        own = [frame for frame in traceback.extract_tb(one.__traceback__) if _is_own(frame.filename)]
        if own:
            return own[-1]
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _is_own(file: str) -> bool:
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.is_file() and not installed and not any(path.is_relative_to(folder) for folder in _NOT_OWN)


def _named(file: str) -> str:
    """Relative to the working directory if the file lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
