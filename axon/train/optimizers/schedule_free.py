"""Schedule-free AdamW: an average of the iterates in place of a falling learning rate."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import optax
from jax import Array

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.descend import widened
from axon.train.optimizers.groups import Parameters


@dataclass(frozen=True)
class ScheduleFreeAdamW(Rule):
    """AdamW whose iterates are averaged, in place of a first moment (Defazio et al., arXiv:2405.15682). The number of
    steps need not be known.

    Gradients are those at y = (1 − b1)·z + b1·x, the parameters of training; z takes AdamW's steps, and x is the mean
    of z over steps, weighted by the largest rate so far to the power of `weight_power`. x is evaluated.

    Args, besides those of `Rule`, whose schedule is best a warm-up and then constant (`Constant`), and whose decay is
    towards y:
        b1: of y. b2, eps: Adam's. weight_power: of a step's rate in the mean.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_power: float = 2.0
    _: KW_ONLY
    weight_decay: float = 0.1

    by_layer: ClassVar[bool] = True
    signed: ClassVar[Mapping[str, bool]] = {"nu": False}

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, 1)", "b1")
        check_range(self, "[0, 1)", "b2")
        check_range(self, "[0, inf)", "weight_power")
        check_range(self, "(0, inf)", "eps")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The gradient over the root of its mean square."""
        return optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True)

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        rate, frozen = self.schedule.function(), self.frozen(parameters)
        inner = optax.contrib.schedule_free(
            super().transform(parameters),
            lambda count: rate(count - 1),  # optax counts this one from 1
            self.b1,
            self.weight_power,
        )

        def trained(values: Any) -> dict[str, Array]:
            return widened({path: value for path, value in values.items() if path not in frozen})

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return inner.update(trained(updates), state, trained(params))

        return optax.GradientTransformation(lambda params: inner.init(trained(params)), update)

    def evaluated(self, state: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        trained = widened({path: values[path] for path in state.z})
        x: Any = optax.contrib.schedule_free_eval_params(state, trained)
        return {path: x[path].astype(value.dtype) if path in x else value for path, value in values.items()}
