"""What a plan was made for, with which the run that it is laid over is compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn.capabilities import HasDims
from axon.nn.language_model import LanguageModel

ABSENT = "none"


@dataclass(frozen=True)
class Planned:
    """The model, batch and machine that a layout and an execution were chosen for (`axon plan --write`).

    Args:
        target: the machine's name, as `h100:2048x8`. devices: how many it has.
        sizes: of the model's axes, `layers` among them, and of a training run `Data.batch` and `Data.seq`.
    """

    target: str
    devices: int
    sizes: Mapping[str, int]

    def placement(self, layout: Layout, devices: Any) -> Placement:
        """The layout on `devices`. Raises `UserError` for another number of them."""
        self._check_count(len(devices))
        return Placement.of(layout, devices)

    def check(self, model: Any, batch: Mapping[str, int], placement: Placement | None) -> None:
        """Raise `UserError` for a model or a batch of other sizes, or another number of devices, by default of those
        that are here."""
        sizes = {**model_sizes(model), **batch}
        different = [
            f"{name} is {self.sizes.get(name, ABSENT)} in the plan and {sizes.get(name, ABSENT)} here"
            for name in dict.fromkeys([*self.sizes, *sizes])
            if self.sizes.get(name) != sizes.get(name)
        ]
        if different:
            raise UserError(
                f"the plan is for another run: {'; '.join(different)}. Set these as they are planned (--set), or plan "
                f"anew: axon plan CONFIG --on {self.target} --write FILE.gin"
            )
        self._check_count(jax.device_count() if placement is None else placement.mesh.size)

    def _check_count(self, count: int) -> None:
        if count != self.devices:
            raise UserError(
                f"the plan is for {self.devices} devices ({self.target}), and there are {count}: plan anew for these, "
                "as axon plan CONFIG --on TARGET --write FILE.gin"
            )


def model_sizes(model: Any) -> dict[str, int]:
    """Sizes of the axes of a configured model; `layers`: how many there are."""
    module = model.build()
    sizes = dict(module.dims) if isinstance(module, HasDims) else {}
    return sizes | ({"layers": module.layers.num_layers} if isinstance(module, LanguageModel) else {})
