"""Frozen models beside the one that is trained: by name, on the same mesh, in no state and in no optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from axon.composition import ONE_BIT, REPLICAS, STAGES, Part
from axon.errors import UserError
from axon.runtime import Runtime, nested
from axon.train.check_parameters import check_parameters
from axon.train.objective import Objective

Values = Mapping[str, Any]
"""Name of a frozen model → its `parameters` and `variables`, nested by path."""


@dataclass
class References:
    """The frozen models of a program.

    Args:
        runtimes: name → the model on the layout of what is trained. values: their arrays, once they are given.
    """

    runtimes: Mapping[str, Runtime] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, objective: Objective, models: Mapping[str, Any], like: Runtime, seq: int) -> "References":
        """Those of the `models` that the objective names, placed as `like` is, in the devices' memory.

        Raises `UserError` if one is missing.
        """
        if missing := sorted(objective.references - models.keys()):
            raise UserError(
                f"{type(objective).__name__} needs a frozen model named {missing[0]!r}, and Train.references has "
                f"{', '.join(map(repr, sorted(models))) or 'none'}: set Train.references = {{{missing[0]!r}: "
                "@Reference()}"
            )
        execution = replace(like.execution, host=(), disk={})
        shared = {"precision": like.precision, "execution": execution, "placement": like.placement, "seq": seq}
        return cls({name: Runtime(models[name], like.layout, **shared) for name in sorted(objective.references)})

    def give(self, name: str, parameters: Any, variables: Any = None) -> None:
        """Set a model's arrays, placed under the `params` rows. Raises `UserError` unless they are the model's."""
        runtime = self.runtimes[name]
        check_parameters(parameters, runtime.parameters, f"those given are not the parameters of {name!r}:")
        self.values[name] = {"parameters": parameters, "variables": variables or runtime.initialise_variables(0)}

    @property
    def given(self) -> Values:
        """The arrays of all. Raises `UserError` for a model that has none yet."""
        if missing := sorted(self.runtimes.keys() - self.values.keys()):
            raise UserError(
                f"the frozen model {missing[0]!r} has no arrays: call references.give({missing[0]!r}, parameters) of "
                "the program or evaluator first"
            )
        return self.values

    @property
    def specs(self) -> dict[str, Any]:
        """The arrays in axes: an `ArraySpec` at each leaf."""
        return {
            name: {"parameters": nested(runtime.parameters), "variables": nested(runtime.variables)}
            for name, runtime in self.runtimes.items()
        }

    @property
    def abstract(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of `given`."""
        specs = self.specs
        return {name: runtime.abstract(specs[name]) for name, runtime in self.runtimes.items()}

    def bound(self, values: Values) -> dict[str, Any]:
        """Name → the module with its arrays."""
        return {name: runtime.bind(**_bindable(values[name])) for name, runtime in self.runtimes.items()}

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        if not self.runtimes:
            return ()
        why = "a frozen model is whole on every replica's step, and replicas with values of their own are given none"
        stages = "a frozen model is not cut into stages"
        excludes = {STAGES: stages, REPLICAS: why, ONE_BIT: why}
        name = f"Train.references ({', '.join(self.runtimes)})"
        return (Part(name, "use an objective that needs no frozen model", excludes=excludes),)


def _bindable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"values": values["parameters"], "variables": values["variables"]}
