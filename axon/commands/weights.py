"""The option of the dtype of a model's weights."""

from typing import Annotated, Literal

import typer

Weights = Annotated[
    Literal["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "nf4"] | None,
    typer.Option(
        help="In which the model's parameters are stored, by default as computed with; int8, float8_e4m3fn, int4 "
        "and nf4: the matrices of its blocks alone, with scales."
    ),
]
