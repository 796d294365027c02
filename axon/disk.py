"""Files that a person names: an error of the system becomes one message with the path in it."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axon.errors import UserError, suggest
from axon.fields import FilePath, FolderPath, Location, StoreLocation, field_values, path_fields

_FULL = (errno.ENOSPC, errno.EDQUOT)
FREE_SPACE = "Free some space and run the same command again"
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")  # one slash is left where it was made a `Path`
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")


def cache_folder() -> Path:
    """`$AXON_CACHE`, else `~/.cache/axon`."""
    return Path(expanded(os.environ.get("AXON_CACHE") or "~/.cache/axon", "the environment variable AXON_CACHE"))


def expanded(path: str | Path, where: str) -> str:
    """A path as a person writes it, with `~`, `$NAME` and `${NAME}` replaced.

    Raises `UserError`, naming the field or option `where`, for a user or variable that is not there.
    """
    text = os.path.expandvars(str(path))
    if (unset := _VARIABLE.search(text)) and not os.path.exists(str(path)):
        raise UserError(f"{where} is {str(path)!r}, and the environment variable {unset[1] or unset[2]} is not set")
    if text.startswith("~") and os.path.expanduser(text) == text:
        raise UserError(f"{where} is {str(path)!r}: there is no user {Path(text).parts[0][1:]!r} with a home folder")
    return os.path.expanduser(text)


def named(path: str | Path, where: str) -> Path:
    """The absolute path for a given one, `expanded`. `where` is the field or option it was given for: `Folder.path`.

    Raises:
        UserError: it is empty, which would be the working directory, a URL, or not a valid path.
    """
    if not str(path) or "\0" in str(path):
        raise UserError(f"{where} is {str(path)!r}; expected a path (. is the working directory)")
    if _URL.match(str(path)):
        raise UserError(
            f"{where} is {str(path)!r}; expected a path. In an object store can be token stores (Data.store) "
            "and copies of a run's checkpoints (Checkpoints.mirror)"
        )
    return Path(expanded(path, where)).absolute()


def output(path: str | Path, where: str, *suffixes: str) -> Path:
    """The file that a command writes, `named`. Raises `UserError` for another suffix: so a mistyped path overwrites no
    configuration or data."""
    found = named(path, where)
    if found.suffix.lower() not in suffixes:
        raise UserError(f"{where} is {str(path)!r}; expected the name of a file that ends in {' or '.join(suffixes)}")
    return found


def location(text: str, where: str) -> str:
    """A URL of a kind that objects can be below, or a path, `expanded`. Raises `UserError` for what is neither."""
    if "://" in text:
        if not re.match(r"(s3|gs)://[^/]|file:///", text):
            raise UserError(f"{where} is {text!r}; expected s3://BUCKET/PATH, gs://BUCKET/PATH, file:///PATH or a path")
        return text
    return as_path(text, where)


def check_paths(config: Any) -> None:
    """Check and expand the paths of a frozen dataclass: its fields that are annotated as one of
    `axon.fields.PATHS`. What begins with `hf:` is left as it is.

    Raises `UserError` with class and field for what is no path.
    """
    kinds = path_fields(type(config))
    for name, value in field_values(config, kinds).items():
        where, expand = f"{type(config).__name__}.{name}", _EXPAND[kinds[name]]
        if isinstance(value, Mapping):
            object.__setattr__(config, name, {key: expand(path, f"{where}[{key!r}]") for key, path in value.items()})
        elif isinstance(value, str) and not value.startswith("hf:"):
            object.__setattr__(config, name, expand(value, where))


def as_path(path: str | Path, where: str) -> str:
    """A path, `expanded`, as relative as it is. Raises as `named`."""
    named(path, where)
    return expanded(path, where)


def _store(text: str, where: str) -> str:
    return text if "://" in text else as_path(text, where)


_EXPAND = {FilePath: as_path, FolderPath: as_path, Location: location, StoreLocation: _store}


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn errors of a file or folder that is missing, cannot be read or is not UTF-8 into `UserError`."""
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(error.filename or path)
        raise UserError(f"There is no file or folder {missing}.{suggest(missing.name, _siblings(missing))}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{_path(error, path)} cannot be read: {reason(error)}.") from error


@contextmanager
def writing(path: str | Path, advice: str = "") -> Iterator[None]:
    """Turn errors of a file or folder that cannot be written into `UserError`; `advice` is what may help."""
    try:
        yield
    except OSError as error:
        help_ = FREE_SPACE if is_full(error) else advice
        raise UserError(f"cannot write {_path(error, path)}: {reason(error)}{'. ' if help_ else ''}{help_}") from error


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder itself, with no file in it. Raises `UserError` if another process has; where the file system has no
    locks, nothing is locked."""
    with reading(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder} is locked by a run that saves into it: wait for it, or stop it") from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def is_array_file(path: str) -> bool:
    """Whether a path below a folder is that of a file of an array, as TensorStore's zarr3 names them."""
    return re.fullmatch(r"(?:.*/)?(?:zarr\.json|c(?:/\d+)*)(?:\.__lock)?", path) is not None


def overlap(one: Path, other: Path) -> bool:
    """Whether two folders are one, or one is in the other, whatever links lead to them; they need not be there."""
    a, b = one.resolve(), other.resolve()
    return a.is_relative_to(b) or b.is_relative_to(a) or (a.exists() and b.exists() and a.samefile(b))


def foreign(folder: Path, own: Callable[[str], object]) -> str | None:
    """What is not Axon's at `folder` or below it, by its path there: a link, or a file whose path is not `own`.

    None if there is nothing of the kind. Empty folders hold nothing, whoever made them.
    """
    if folder.is_symlink() or not folder.is_dir():
        return "."
    for at, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            path = os.path.join(at, name)
            below = os.path.relpath(path, folder)
            if os.path.islink(path) or (name in files and not own(below)):
                return below
    return None


def delete_own(folder: Path, own: Callable[[str], object]) -> None:
    """Deletes a folder in which there is nothing `foreign`; raises `UserError`, and deletes nothing, if there is."""
    if name := foreign(folder, own):
        raise UserError(f"{folder / name} is not Axon's, so {folder} is not deleted: move it elsewhere")
    shutil.rmtree(folder)


def check_new(path: Path, where: str) -> None:
    """Raise `UserError` if there is anything but an empty folder at `path`, where a new one is to be."""
    with reading(path):
        empty = path.is_dir() and not any(path.iterdir())
    if not empty:
        check_new_file(path, where)


def check_new_file(path: Path, where: str) -> None:
    """Raise `UserError` if there is anything at `path`, a link that leads nowhere too, or nothing can be."""
    try:
        there = path.exists() or path.is_symlink()
    except OSError as error:
        raise UserError(f"{where} is {str(path)!r}: {reason(error)}") from error
    if there:
        raise UserError(f"{where}: {path} is there already; give another, or delete it")


def free_name(path: Path, suffix: str) -> Path:
    """A path beside `path`, with a suffix, at which there is nothing."""
    name, number = path.with_name(f"{path.name}{suffix}"), 1
    while name.exists() or name.is_symlink():
        number += 1
        name = path.with_name(f"{path.name}{suffix}-{number}")
    return name


@contextmanager
def atomic_folder(path: Path, where: str) -> Iterator[Path]:
    """A new folder beside `path`, which is moved there once the body has filled it: `path` is whole or not there.

    After an error, as of a full disk, nothing is left. Raises as `check_new`.
    """
    check_new(path, where)
    path = path.resolve()
    part = free_name(path, ".part")
    try:
        with writing(part, f"Give another {where}"):
            part.mkdir(parents=True)
            yield part
            check_new(path, where)
            part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # made above
        raise


def readable(size: float) -> str:
    """Bytes in decimal units: 1.2 GB."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    size /= 1000
    return f"{size:.3g} TB" if size < 999.5 else f"{size:,.0f} TB"


def is_full(error: Any) -> bool:
    """Whether a full disk or quota is what an error, of the system or of TensorStore, says."""
    found = error.errno if isinstance(error, OSError) else None
    return found in _FULL or any(os.strerror(number) in str(error) for number in _FULL)


def reason(error: OSError | ValueError) -> str:
    """The reason of a file's failure, in a few words."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start:,})"
    if not isinstance(error, OSError):
        return str(error)
    file = Path(str(error.filename))
    if isinstance(error, FileExistsError) and file.is_symlink() and not file.exists():
        return f"it is a link to {os.readlink(file)}, which is not there"
    if isinstance(error, FileExistsError) and file.is_file():
        return "it is a file, not a folder"
    return error.strerror or str(error)


def _path(error: Exception, path: str | Path) -> str:
    """The file that failed: that of the error, else `path`."""
    found = error.filename if isinstance(error, OSError) else None
    return str(path if found is None or isinstance(found, int) else found)


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
