"""Reading a configuration file into a tree, and writing a tree as such a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon.config.bindings import Bindings
from axon.config.files import OVERRIDE, read, shown
from axon.config.mistakes import ConfigError, Mistake, Place
from axon.config.names import Names
from axon.config.render import Line, Text, render
from axon.config.resolve import DEFAULT, Resolver

# The modules whose public names need no import line.
AXON = (
    "axon.run",
    "axon.layout",
    "axon.data",
    "axon.nn.lora",
    "axon.nn.quantized",
    "axon.parallel.outer",
    "axon.parallel.pipeline.schedules",
    "axon.train.optimizers",
    "axon.train.objective",
    "axon.train.distillation",
    "axon.train.graded_reward",
    "axon.train.masked",
    "axon.train.spans",
    "axon.train.classification",
    "axon.train.preference",
    "axon.train.kto",
    "axon.train.contrastive",
    "axon.train.text_classification",
    "axon.train.policy_gradient",
    "axon.train.ppo",
    "axon.train.adapters_off",
    "axon.serve.capacity",
    "axon.serve.request",
    "axon.tune",
    "axon.observe.trackers",
    "axon.checkpoint",
    "axon.precision",
    "axon.nn",
)

_ORIGIN_COLUMN = 48


@dataclass(frozen=True)
class Resolved:
    """A configuration, read and checked.

    Attributes:
      tree: the root object (a Train, or a Serve).
      text: the tree as gin text, every field bound; `load` reads it back to an equal tree.
      origins: for each key of `text` (`Llama.layers`) where its value was written: `configs/quickstart.gin:12`,
        `--set`, or `default`; a macro adds its own place.
      lines: `text` line by line, each binding with its origin as a comment.
    """

    tree: Any
    text: str
    origins: dict[str, str]
    lines: tuple[str, ...]


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    plan: Path | None = None,
    modules: Sequence[str] = AXON,
    root: str = "Train",
) -> Resolved:
    """The tree that the file at `path` describes, with what the file `plan` binds (`axon plan --write`) in place of its
    own, and `overrides` (`Name.field=value`) bound last.

    Raises ConfigError with all the mistakes of all the files, each with its place.
    """
    tree, resolver, mistakes = _resolve(path, overrides, plan, modules, root)
    mistakes += _without_effect(resolver, path, overrides, plan, modules, root)
    if mistakes:
        raise ConfigError(mistakes)
    text = render(tree, Names(modules))
    origins = {line.key: _origin(line.path, resolver.origins) for block in text.objects for line in block}
    return Resolved(tree, str(text), origins, tuple(_annotated(text, origins).split("\n")))


def root_of(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The root of the tree that the file at `path` describes: `Serve` if it binds that one's fields, else `Train`."""
    statements = read(path, overrides)
    own = (binding.selector.rpartition(".")[2] for binding in statements.bindings if statements.is_own(binding))
    return "Serve" if "Serve" in own else "Train"


def dump(tree: Any, *, modules: Sequence[str] = AXON) -> str:
    """`tree` as gin text with every field bound; equal trees give the same text, and `load` reads it to an equal tree.

    Raises ConfigError for a value that gin text cannot express (an array, nan, a function defined inside another).
    """
    return str(render(tree, Names(modules)))


def _resolve(
    path: str | Path, overrides: Sequence[str], plan: Path | None, modules: Sequence[str], root: str
) -> tuple[Any, Resolver, list[Mistake]]:
    """The tree, its resolver, and all mistakes but bindings without effect."""
    statements = read(path, overrides, plan)
    names = Names(modules)
    unread = statements.mistakes + names.import_all(statements.imports)
    bindings = Bindings(statements, names, partial=bool(unread))
    resolver = Resolver(bindings, names)
    tree = resolver.build(root, Place(statements.main))
    resolver.finish()
    return tree, resolver, unread + bindings.mistakes + resolver.mistakes


def _without_effect(
    resolver: Resolver,
    path: str | Path,
    overrides: Sequence[str],
    plan: Path | None,
    modules: Sequence[str],
    root: str,
) -> list[Mistake]:
    """The bindings without effect that are mistakes: of the file's, only those without effect alone too.

    `--set Train.sample=None` leaves the file's `Sample.prompt` unused, and a plan without a pipeline its
    `Interleaved.virtual`: neither is a mistake.
    """
    if not (resolver.unused and (overrides or plan)):
        return resolver.unused
    _, alone, _ = _resolve(path, (), None, modules, root)
    without, own = {OVERRIDE, *(mistake.place for mistake in alone.unused)}, plan and shown(plan)
    return [mistake for mistake in resolver.unused if mistake.place in without or mistake.place.file == own]


def _origin(path: str, origins: dict[str, str]) -> str:
    """The origin of the value at `path`, or of the nearest value around it (a function's result has only one)."""
    around = [known for known in origins if path == known or path.startswith((f"{known}.", f"{known}["))]
    return origins[max(around, key=len)] if around else DEFAULT


def _annotated(text: Text, origins: dict[str, str]) -> str:
    blocks = ["\n".join(_with_origin(line, origins[line.key]) for line in block) for block in text.objects]
    return "\n\n".join(["\n".join(text.imports)] * bool(text.imports) + blocks)


def _with_origin(line: Line, origin: str) -> str:
    *wrapped, last = str(line).split("\n")
    return "\n".join([*wrapped, f"{last:<{_ORIGIN_COLUMN}}  # {origin}"])
