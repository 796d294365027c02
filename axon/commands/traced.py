"""`--profile` of `axon train`: alone, or with the steps to trace."""

import re
from typing import Annotated

import typer
from typer.core import TyperCommand

from axon.errors import UserError

FLAG, FIRST = "--profile", "first"
"""The option, and its value where none follows it."""

_VALUE = re.compile(r"[\d:+-]+")
_STEPS = re.compile(r"(\d{1,10}):(\d{1,10})")

Profile = Annotated[
    str | None,
    typer.Option(
        FLAG,
        metavar="[FIRST:LAST]",
        help="Trace these steps for `axon profile` and XProf; alone, a start's first 5.",
    ),
]


class TakesProfile(TyperCommand):
    """A command whose `--profile` may stand without a value, which typer has no word for."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        following = [*args[1:], ""]
        pairs = zip(args, following, strict=True)
        return super().parse_args(
            ctx, [f"{FLAG}={FIRST}" if one == FLAG and not _VALUE.fullmatch(next_) else one for one, next_ in pairs]
        )


def steps_of(text: str | None) -> bool | tuple[int, int]:
    """The steps to trace, by the option's value. Raises `UserError` for what is not FIRST:LAST."""
    if text is None or text == FIRST:
        return text is not None
    if (steps := _STEPS.fullmatch(text)) is None:
        raise UserError(
            f"{FLAG} is {text!r}; expected the first and the last step to trace, as {FLAG} 50:53, or nothing after it "
            "for the first steps of this start"
        )
    return int(steps[1]), int(steps[2])
