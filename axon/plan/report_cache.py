"""Reports of compiled steps in a folder, by what was compiled: each is compiled once, however often a search is
stopped."""

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from axon.disk import writing
from axon.plan.report import DoesNotFit, Report, compile_lowered
from axon.signed_json import signed, unsigned
from axon.train.step import Program

_COMPILERS = ("axon-jax", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
"""What a report depends on besides the program."""


@dataclass(frozen=True)
class ReportCache:
    """Compiles steps, and keeps in `folder` what is reported of each, or by how much it did not fit.

    A file's name is a hash of the lowered program, so that a model whose code has changed is compiled again; of the
    compiler's options, the target, and the versions of JAX, of its compilers and of Axon.
    """

    folder: Path

    def report(self, program: Program, target: str) -> Report:
        """As `compile_step`. Raises `DoesNotFit` as that does, and `UserError` if the folder cannot be written."""
        lowered = program.lower()
        path = self.folder / f"{_digest(program, lowered.as_text(), target)}.json"
        found = _read(path)
        if found is None:
            found = _compiled(program, target, lowered)
            _write(path, found)
        if "message" in found:
            raise DoesNotFit(found["message"], found["needed"])
        return Report.of(found["report"])


def _digest(program: Program, text: str, target: str) -> str:
    options = sorted(program.runtime.compiler_options.items())
    return hashlib.sha256(f"{target} {options} {[_version(one) for one in _COMPILERS]}\n{text}".encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiled(program: Program, target: str, lowered: Any) -> dict[str, Any]:
    try:
        return {"report": compile_lowered(program, target, lowered)[0].json()}
    except DoesNotFit as error:
        return {"message": str(error), "needed": error.needed}


def _read(path: Path) -> dict[str, Any] | None:
    """What was written; None for a file that is not there or not whole, which is compiled again."""
    try:
        return unsigned(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, found: dict[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(signed(found), encoding="utf-8")
        fresh.replace(path)
