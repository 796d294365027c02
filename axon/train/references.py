"""Frozen models beside the one that is trained: by name, on the same mesh, in no state and in no optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from axon.composition import ONE_BIT, REPLICAS, STAGES, Part
from axon.errors import UserError
from axon.nn.param import padded
from axon.nn.weight_transform import WeightTransform
from axon.runtime import Runtime, flattened, nested
from axon.train.adapters_off import AdaptersOff
from axon.train.check_parameters import check_parameters
from axon.train.objective import Objective

Values = Mapping[str, Any]
"""Name of a frozen model → its `parameters` and `variables`, nested by path."""


@dataclass
class References:
    """The frozen models of a program.

    Args:
        runtimes: name → the model on the layout of what is trained. values: their arrays, once they are given.
        bases: name → a runtime of the trained model without its adapters, whose arrays are the state's.
        trained: the runtime of what is trained. of_objective: names of those that the objective is given. on_stages:
            why they cannot be cut into a pipeline's stages, or nothing.
    """

    runtimes: Mapping[str, Runtime] = field(default_factory=dict)
    bases: Mapping[str, Runtime] = field(default_factory=dict)
    trained: Runtime | None = None
    values: dict[str, Any] = field(default_factory=dict)
    of_objective: frozenset[str] = frozenset()
    on_stages: str = ""

    @classmethod
    def of(
        cls,
        objective: Objective,
        models: Mapping[str, Any],
        like: Runtime,
        seq: int,
        of_data: frozenset[str] = frozenset(),
    ) -> "References":
        """The references of the `models` that the objective or the data (`of_data`) names, placed as `like` is, in the
        devices' memory.

        Raises `UserError` if one is missing.
        """
        needed = objective.references | of_data
        if missing := sorted(needed - models.keys()):
            user = type(objective).__name__ if missing[0] in objective.references else "Train.data"
            raise UserError(
                f"{user} needs a frozen model named {missing[0]!r}, and Train.references has "
                f"{', '.join(map(repr, sorted(models))) or 'none'}: set Train.references = {{{missing[0]!r}: "
                "@Reference()}"
            )
        if unused := sorted(models.keys() - needed):
            raise UserError(
                f"Train.references has {unused[0]!r}, and {type(objective).__name__} and Train.data use "
                f"{', '.join(map(repr, sorted(needed))) or 'no frozen model'}: leave it out"
            )
        execution = like.execution.on_devices
        shared = {"precision": like.precision, "execution": execution, "placement": like.placement, "seq": seq}
        named = {name: models[name] for name in sorted(needed)}
        bases = [name for name, model in named.items() if isinstance(model, AdaptersOff)]
        kept = _without_adapters(like, bases)
        return cls(
            {name: Runtime(model, like.layout, **shared) for name, model in named.items() if name not in bases},
            {name: Runtime(like.model, like.layout, transforms=kept, **shared) for name in bases},
            like,
            of_objective=objective.references,
            on_stages=_on_stages(objective, of_data),
        )

    def give(self, name: str, parameters: Any, variables: Any = None) -> None:
        """Set a model's arrays, placed under the `params` rows, with the layers that `Layout.pad_layers` adds or
        without. Raises `UserError` unless they are the model's."""
        runtime, what = self.runtimes[name], f"those given are not the parameters of {name!r}:"
        check_parameters(parameters, runtime.parameters, what, padded=True)
        stored = _with_padding(runtime, parameters)
        self.values[name] = {"parameters": stored, "variables": variables or runtime.initialise_variables(0)}

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

    @property
    def modules(self) -> dict[str, Any]:
        """Name → the module, without arrays, of those that the objective is given."""
        return {name: self.runtime(name).module for name in sorted(self.of_objective)}

    def arrays(self, values: Values, parameters: Any, variables: Any) -> Values:
        """Name → `parameters` and `variables` of those that the objective is given; of what is trained they are the
        arguments."""
        named = {name: values[name] for name in self.runtimes if name in self.of_objective}
        if self.bases:
            own = flattened(parameters)
            for name, runtime in self.bases.items():
                stored = {path: own[self._stored(path)] for path in runtime.parameters}
                named[name] = {"parameters": nested(stored), "variables": variables}
        return named

    def bound(self, values: Values, parameters: Any, variables: Any) -> dict[str, Any]:
        """Name → the module with its arrays, of those that the objective is given; arguments as of `arrays`."""
        named = self.arrays(values, parameters, variables)
        return {name: self.runtime(name).bind(**_bindable(own)) for name, own in named.items()}

    def runtime(self, name: str) -> Runtime:
        """That of a model by its name."""
        return self.bases[name] if name in self.bases else self.runtimes[name]

    def frozen(self, name: str, values: Any) -> Any:
        """The module of a model with arrays of its own, its `values`."""
        return self.runtimes[name].bind(**_bindable(values))

    def _stored(self, path: str) -> str:
        """Where the trained model has the parameter `path` of the one without adapters."""
        assert self.trained is not None
        for weight in self.trained.operands:
            below = f"{weight}/base{path.removeprefix(weight)}"
            if f"{path}/".startswith(f"{weight}/") and below in self.trained.parameters:
                return below
        return path

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        if not self.runtimes and not self.bases:
            return ()
        why = "a frozen model is whole on every replica's step, and replicas with values of their own are given none"
        excludes = {REPLICAS: why, ONE_BIT: why} | ({STAGES: self.on_stages} if self.on_stages else {})
        name = f"Train.references ({', '.join((*self.runtimes, *self.bases))})"
        return (Part(name, "use an objective that needs no frozen model", excludes=excludes),)


def _without_adapters(trained: Runtime, names: Sequence[str]) -> list[WeightTransform]:
    """The transforms of what is trained but for adapters. Raises `UserError` where the references of these `names`
    would not be what training begins with: without adapters, or where other parameters train beside them."""
    adapters = [one for one in trained.transforms if one.adapts]
    if names and (moved := [one for one in adapters if not one.keeps_weights]):
        raise UserError(
            f"Train.references[{names[0]!r}] is AdaptersOff(), and {moved[0].text} takes a part of the model's weights "
            "into the adapters: set it to a Reference() to the model that the run starts from, or LoRA.init = 'normal'"
        )
    kind = next((type(one).__name__ for one in adapters if one.others), None)
    if names and (kind or not adapters):
        why = f"{kind}.others trains parameters that have no adapter" if kind else "Train.transforms has no adapter"
        raise UserError(
            f"Train.references[{names[0]!r}] is AdaptersOff(), and {why}: set it to a Reference() to the model that "
            f"the run starts from, or {f'{kind}.others to ()' if kind else 'Train.transforms = (@LoRA(),)'}"
        )
    return [one for one in trained.transforms if not one.adapts]


def _with_padding(runtime: Runtime, parameters: Any) -> Any:
    """Parameters with the layers that `Layout.pad_layers` adds."""
    specs = nested(runtime.parameters)
    if all(jax.tree.leaves(jax.tree.map(lambda x, spec: tuple(x.shape) == spec.shape, parameters, specs))):
        return parameters
    places = jax.tree.map(lambda one: one.sharding, runtime.abstract(specs))
    with runtime.tracing():
        return runtime.jit(lambda values: jax.tree.map(padded, values, specs), out_shardings=places)(parameters)


def _on_stages(objective: Objective, of_data: frozenset[str]) -> str:
    if of_data:
        return "a frozen model that the data needs is not cut into stages"
    if type(objective).reference_values is Objective.reference_values:
        return f"{type(objective).__name__} has no `reference_values`, by which a frozen model is cut into stages"
    return ""


def _bindable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"values": values["parameters"], "variables": values["variables"]}
