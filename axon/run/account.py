"""The common ground of a run's processes, as field → value, for `check_alike`."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax

from axon.checkpoint import Reader
from axon.checkpoint.verify import saved_time
from axon.data import Prepared
from axon.fields import ABSENT, FilePath, differs_by_machine, leaves, path_fields
from axon.observe.record import versions
from axon.own_code import axon_digest, own_modules
from axon.run.folder import RunFolder
from axon.run.tree import Train

_OF_A_MACHINE = re.compile(r"--xla_(dump\S*|force_host_platform_device_count)(=\S*)?\s*")
"""XLA's flags that may differ between the processes of a run."""
_SETTINGS = (
    *("jax_platforms", "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    "jax_threefry_partitionable",
)
_SMALL = 2**26
"""Bytes of a file up to which its content is compared; of larger ones that of the data that are made of them is."""


def account_of(train: Train, **options: Any) -> dict[str, str]:
    """Of what a process is to do before it reads any data: software, configuration, and options of the call."""
    software = {f"the version of {name}": str(version) for name, version in versions().items()}
    software |= {"the code of axon": axon_digest()}
    software |= {f"the code of {name}": digest for name, digest in own_modules().items()}
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    software |= {"XLA_FLAGS and LIBTPU_INIT_ARGS": " ".join(sorted(_OF_A_MACHINE.sub("", flags).split()))}
    software |= {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    asked = {f"--{name}": repr(value) for name, value in options.items()}
    return software | leaves(train, differs_by_machine) | _contents(train, "") | asked


def data_account(folder: RunFolder, corpus: Prepared, source: Any, frozen: Mapping[str, str]) -> dict[str, str]:
    """Of what a process has found: its data, and the run that it continues, or begins with: `source`;
    `frozen`: of each frozen model a digest."""
    identity, reader = corpus.identity(), Reader(folder.checkpoints)
    latest = reader.latest()
    data = {f"the digest of data.sources[{n}]": digest for n, digest in enumerate(identity.pop("digests"))}
    data |= {"the digests of held-out data": str(identity.pop("held_out_digests", None))}
    if corpus.tokenizer is not None:
        data |= {"the digest of the tokenizer": _digest(corpus.tokenizer.to_json().encode())}
    saved = None if latest is None else f"step {latest}, saved at {saved_time(reader.directory / str(latest))}"
    identifier = folder.id.read_text("utf-8") if folder.id.is_file() else ABSENT
    if source is not None:
        data |= {"the checkpoint of init_from": source.digest()}
    data |= {f"the checkpoint of references[{name!r}]": digest for name, digest in frozen.items()}
    return data | {"the run in run_dir": identifier, "the latest checkpoint in run_dir": saved or ABSENT}


def _contents(part: Any, path: str) -> dict[str, str]:
    """The digests of small files that fields of `part`, and of objects below it, name."""
    found: dict[str, str] = {}
    for name, value in vars(part).items() if is_dataclass(part) else ():
        inner = f"{path}.{name}".removeprefix(".")
        if path_fields(type(part)).get(name) is FilePath and isinstance(value, str):
            found |= {f"the content of {inner}": _file_digest(Path(value))}
        for number, item in enumerate(value if isinstance(value, list | tuple) else [value]):
            found |= _contents(item, f"{inner}[{number}]" if isinstance(value, list | tuple) else inner)
    return found


def _file_digest(path: Path) -> str:
    try:
        return _digest(path.read_bytes()) if path.is_file() and path.stat().st_size <= _SMALL else "not compared"
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
