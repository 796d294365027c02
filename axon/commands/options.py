"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from axon.commands.paths import path

Config = Annotated[Path, typer.Argument(parser=path, metavar="CONFIG", help="A .gin file.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="NAME.FIELD=VALUE", help="Bind a value last, as a line of the file would.")
]
Planned = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        parser=path,
        metavar="FILE.gin",
        help="A plan (axon plan --write) to lay over CONFIG.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Weights = Annotated[
    Literal["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "nf4", "mxfp4"] | None,
    typer.Option(
        help="In which the model's parameters are stored, by default as computed with; int8, float8_e4m3fn, int4 "
        "and nf4: the matrices of its blocks alone, with scales; mxfp4: of experts alone."
    ),
]

Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Use this adapter beside the model: a folder of PEFT's, hf:NAME, or a run with LoRA."
    ),
]
