"""The start of a run: which parameters of another model are taken, and under which names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.disk import check_paths
from axon.errors import UserError, suggest
from axon.fields import Location
from axon.path_patterns import Patterns, check_patterns, listed, matches
from axon.train.check_parameters import check_parameters


@dataclass(frozen=True)
class InitFrom:
    """Parameters of another model that a run starts from; the others have their initial values.

    What is taken is trained like the rest, unless a `Group` of the optimizer with `frozen=True` matches it.

    Args:
        source: the folder of a run or its mirror's URL, or `hf:DIR_OR_NAME`.
        paths: a shell-style pattern of this model's parameters, or several, as `Group.paths`: all that match are taken,
            and no others.
        rename: pairs (old, new) of the beginnings of paths, whole parts of them, in the source and in this model: for
            each path the first pair that fits applies. '' is the beginning of every path: `('encoder', '')` takes a
            subtree, `('', 'encoder')` puts all into one.
        cast: whether a run's arrays of another dtype are cast to this model's, as those of `hf:` always are.
        optimizer: whether the whole state of a run is taken: the optimizer's, variables, step and place in the data
            too, so that this run continues it, under a schedule of its own. See `axon.run.branch`.
        step: with `optimizer`, of which checkpoint; None: the latest.
        changed: fields of the model's config that are meant to be others than the source's, as ('rope.theta',): another
            that is refuses the start, since the weights were trained with theirs.
        adapter: `hf:DIR_OR_NAME` of an adapter of PEFT's, from which LoRA's factors start: `Train.transforms` have LoRA
            of the same weights, as `PeftLoRA`.
    """

    source: Location
    paths: Patterns = ("*",)
    rename: tuple[tuple[str, str], ...] = ()
    cast: bool = False
    optimizer: bool = False
    step: int | None = None
    changed: tuple[str, ...] = ()
    adapter: Location | None = None

    def __post_init__(self):
        check_paths(self)
        check_range(self, "[0, inf)", "step")
        if self.optimizer and (not self.whole or self.cast):
            raise UserError(
                "InitFrom.optimizer is True, which takes all of a run's state as it is: leave out InitFrom.paths, "
                "rename and cast"
            )
        if self.step is not None and not self.optimizer:
            raise UserError("InitFrom.step is of InitFrom.optimizer = True; without it the latest checkpoint is taken")
        if self.changed and not self.whole:
            raise UserError("InitFrom.changed is for a model that is taken whole: leave it out, or paths and rename")
        if not self.paths:
            raise UserError("InitFrom.paths is empty, so nothing would be taken: leave it out for all parameters")

    @property
    def whole(self) -> bool:
        """Whether it takes all of a model, as it is named there."""
        return "*" in listed(self.paths) and not self.rename and not any(one[0] == "!" for one in listed(self.paths))

    def check_changed(self, found: Mapping[str, str]) -> None:
        """Raise `UserError` unless the fields that differ from the source's are those that are meant to.

        `found`: field → what it is, and what there.
        """
        if unsaid := [text for name, text in found.items() if name not in self.changed]:
            names = tuple(sorted({*found, *self.changed}))
            raise UserError(
                f"the weights of {self.source} were trained with another config:\n  " + "\n  ".join(unsaid) + "\nTake "
                f"its own, Train.model = @Hub() with Hub.source = {self.source!r}; or, if that is meant, set "
                f"Train.init_from = @InitFrom() and InitFrom.changed = {names}"
            )
        if same := [name for name in self.changed if name not in found]:
            raise UserError(
                f"InitFrom.changed has {same[0]!r}, which is as in {self.source}: leave it out."
                f"{suggest(same[0], found)}"
            )

    def takes(self, path: str) -> bool:
        """Whether this model's parameter `path` is to be taken."""
        return matches(path, self.paths)

    def renamed(self, path: str) -> str:
        """The path in this model of the source's `path`."""
        for old, new in self.rename:
            if _begins(path, old):
                return "/".join(part for part in (new, path[len(old) :].strip("/")) if part)
        return path

    def taken(self, offered: Mapping[str, Any], parameters: Specs, cast: bool) -> dict[str, str]:
        """A model's path → the source's, of all that is taken.

        Args:
            offered: the source's path → its shape and dtype. parameters: this model's. cast: dtypes may differ.

        Raises one `UserError` that lists what is missing, unexpected, or of another shape or dtype.
        """
        self._check_patterns(offered, parameters)
        taken: dict[str, str] = {}
        for theirs in offered:
            if self.takes(ours := self.renamed(theirs)):
                if ours in taken:
                    raise UserError(
                        f"InitFrom.rename gives {taken[ours]} and {theirs} of {self.source} one path: {ours}"
                    )
                taken[ours] = theirs
        wanted = {path: spec for path, spec in parameters.items() if self.takes(path)}
        what = (
            f"the parameters in {self.source} are not those of this model (InitFrom.paths says which are taken, "
            "InitFrom.rename under which names, and InitFrom.cast allows another dtype):"
        )
        check_parameters({ours: offered[theirs] for ours, theirs in taken.items()}, wanted, what, cast)
        return taken

    def _check_patterns(self, offered: Mapping[str, Any], parameters: Specs) -> None:
        check_patterns("InitFrom.paths", self.paths, parameters, "of this model")
        for old, _ in self.rename:
            if not any(_begins(path, old) for path in offered):
                raise UserError(
                    f"InitFrom.rename has {old!r}, with which no path in {self.source} begins."
                    f"{suggest(old, _beginnings(list(offered)))}"
                )


def _begins(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(start + "/")


def _beginnings(paths: Sequence[str]) -> set[str]:
    """All that paths begin with, in whole parts."""
    parts = [path.split("/") for path in paths]
    return {"/".join(one[:count]) for one in parts for count in range(1, len(one) + 1)}
