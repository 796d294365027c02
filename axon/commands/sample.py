"""`axon sample`."""

from pathlib import Path
from typing import Annotated

import typer

from axon.commands.paths import path


def sample(
    run_dir: Annotated[
        Path, typer.Argument(parser=path, metavar="RUN_DIR", help="The folder of a run, which need not be there yet.")
    ],
) -> None:
    """Sample answers for a run that trains elsewhere and has Samplers.address, on the devices here, until it ends.

    Example: `axon sample runs/grpo`
    """
    from axon.launch.lobby import join
    from axon.tune.samplers import LOBBY

    join(run_dir / LOBBY, typer.echo)
