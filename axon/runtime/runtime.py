"""A module on a mesh, in a precision, with its kernels: what a training step, evaluation and generation stand on."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import ArraySpec, Execution
from axon.chips import xla_options
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn import Param, ParamSpec, Variable, initialise, parameters, variables
from axon.nn.capabilities import ReportsMetrics
from axon.nn.param import initialise_parameters, initialise_variables, store_in
from axon.nn.quantized import Quantize, quantized_format
from axon.nn.stored_layers import pad_layers
from axon.nn.weight_transform import WeightTransform, transform_weights, transforms_text
from axon.own_code import written_at
from axon.precision import Precision
from axon.runtime.cached import leave_out_cached_programs
from axon.runtime.context import with_context
from axon.runtime.execution import check_compiler_options, check_execution

IDENTITY_LAYERS = "identity layers"
"""The topic of the choice to store more layers than there are."""

NO_DEVICE = "only AbstractMesh exists"
"""What JAX (0.12) says where it would compile for a mesh that is only described."""

LOWERING_PLATFORM = {"gpu": "cuda"}
"""A described GPU has no backend to ask what "gpu" means there."""


class Runtime:
    """A module with a place for each of its arrays; it knows neither objective nor optimizer.

    Args:
        model: a config that builds the module, as `models.llama.Llama`.
        layout: where each named axis lives. precision: dtypes. execution: how it is carried out.
        devices: those of the mesh, all there are by default; or those of a described topology, to compile for.
        placement: instead of devices, the layout on a mesh that is only described, to trace for.
        seq: positions of the sequences of training, for which a `Layout.context` of None is chosen.
        weights: the dtype in which parameters are stored and restored where nothing trains them; by default their own.
            int8, float8_e4m3fn, int4 and nf4: of the blocks' matrices (`axon.nn.quantized`), and the compute dtype of
            the others.
        transforms: what becomes of weights (`axon.nn.weight_transform`), in this order.

    `model` is that config, `module` what it built. `declared` are the model's parameters, path → specification;
    `parameters` and `variables` the module's, after the transforms, which made `operands` of some of the declared, by
    their paths; `choices` collects what was chosen while tracing.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        *,
        precision: Precision = Precision(),
        execution: Execution = Execution(),
        devices: Sequence[Any] | None = None,
        placement: Placement | None = None,
        seq: int | None = None,
        weights: Any = None,
        transforms: Sequence[WeightTransform] = (),
    ):
        self.model = model
        self.module: Any = _built(model)
        self.precision, self.execution = precision, execution
        check_execution(execution, self.module)
        placement = replace(placement or Placement.of(layout, devices), host=execution.host, disk=execution.disk)
        self.placement, context = with_context(placement, self.module, seq)
        options, without = xla_options(self.placement.devices)
        options += tuple(one for each in transforms for one in each.options(self.placement.platform))
        self.compiler_options = {option.name: option.value for option in options} | dict(execution.compiler_options)
        check_compiler_options(execution, self.placement)
        leave_out_cached_programs(self.placement.devices)
        self.choices = _first_choices(self.placement, self.compiler_options, without)
        if context is not None:
            self.choices["context parallelism"] = context
        if padded := pad_layers(self.module, self.placement):
            self.choices[IDENTITY_LAYERS] = "; ".join(_padding_text(*counts) for counts in padded.items())
        store_in(self.module, precision.parameters)
        form = quantized_format(weights)
        self.weights = weights = weights if weights is None or form else jnp.dtype(weights)
        self.declared = parameters(self.module)
        self.transforms = (*([Quantize(form)] if form else []), *transforms)
        self.operands = transform_weights(self.module, self.transforms) if self.transforms else {}
        self.parameters, self.variables = parameters(self.module), variables(self.module)
        if weights is not None:
            others = self.compute_dtype if form else weights
            self.parameters = {p: _stored(p, spec, self.operands, others) for p, spec in self.parameters.items()}
        if self.transforms:
            self.choices["weights"] = "; ".join(transforms_text(self.transforms, self.declared, self.parameters))
        self._reporters = {
            "/".join(map(str, path)): module
            for path, module in nnx.iter_modules(self.module)
            if isinstance(module, ReportsMetrics)
        }
        self._graph, *states, foreign = nnx.split(self.module, Param, Variable, ...)
        _refuse_foreign(type(model).__name__, foreign)
        paths = [path for state in states for path, _ in nnx.to_flat_state(state)]
        self._paths = {"/".join(map(str, path)): path for path in paths}

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def compute_dtype(self) -> Any:
        """The dtype of a contraction's operands on this mesh's platform."""
        return self.precision.compute_dtype(self.placement.platform)

    def derived(self, path: str, value: Any) -> Any:
        """What is stored of the value of a declared parameter: itself, or of an operand what follows from it, nested by
        path within it.

        Each device makes those of its own shard; where that is a part of what is summed over, they agree on scales.
        Raises `UserError` for a value of another shape.
        """
        if path not in self.operands:
            return value
        spec = self.declared[path]
        if tuple(value.shape) != spec.shape:
            raise UserError(f"{path} has the shape {tuple(value.shape)}, and must have {spec.shape} here")
        operand = self.operands[path]
        names = jax.eval_shape(operand.derived, jax.ShapeDtypeStruct(spec.shape, value.dtype))
        places = {name: self._place(self.parameters[f"{path}/{name}"]) for name in names}
        with self.tracing():
            run = jax.jit(operand.derived, out_shardings=places)
            return nested(run(jax.device_put(value, self._place(spec))))

    def merged(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Path → each declared parameter, of the module's by path: of an operand the weight that it stands for."""
        return {path: self._merged(path, values) if path in self.operands else values[path] for path in self.declared}

    def _merged(self, path: str, values: Mapping[str, Any]) -> Any:
        own = {name.removeprefix(f"{path}/"): x for name, x in values.items() if name.startswith(f"{path}/")}
        spec, operand = self.declared[path], self.operands[path]
        with self.tracing():
            run = jax.jit(lambda own: operand.merged(own).astype(spec.dtype), out_shardings=self._place(spec))
            return run(own)

    def _place(self, spec: ArraySpec) -> Any:
        return self.placement.sharding(spec.axes, spec.kind)

    def initialise(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters and variables with initial values, nested by path, made sharded: the same bits on every layout."""
        return initialise(self.module, seed, self.placement)

    def initialise_parameters(self, seed: int, paths: Collection[str]) -> dict[str, Any]:
        """Some of the parameters alone."""
        return initialise_parameters(self.module, seed, self.placement, paths) if paths else {}

    def initialise_variables(self, seed: int) -> dict[str, Any]:
        """The variables alone."""
        return initialise_variables(self.module, seed, self.placement) if self.variables else {}

    def bind(self, values: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> Any:
        """The module with these parameters and variables, nested by path."""
        flat = flattened(values) | flattened(variables or {})
        return nnx.merge(self._graph, nnx.traversals.unflatten_mapping({self._paths[p]: v for p, v in flat.items()}))

    @contextmanager
    def tracing(
        self,
        placement: Placement | None = None,
        execution: Execution | None = None,
        row_block: int | None = None,
    ) -> Iterator[None]:
        """The runtime's mesh, precision and layout in force; `placement` and `execution` instead of the runtime's own;
        `row_block` as of `axon.axes.Scope`.

        Within, functions of `jit` are called, traced and lowered. Arrays are made before, or in such a function: raises
        `UserError` for one that is made outside, which has no device to be on.
        """
        placement = placement or self.placement
        execution = execution or self.execution
        dtypes = self.compute_dtype, self.precision.reduce_dtype
        attention = next((each.attention for each in self.transforms if each.attention is not None), None)
        scope = axes.Scope(placement, *dtypes, execution, self.choices, row_block=row_block, attention=attention)
        try:
            with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh), axes.activate(scope):
                yield
        except ValueError as error:
            if NO_DEVICE not in str(error):
                raise
            raise UserError(
                "within runtime.tracing() an array was made outside of a compiled function, or one that is not on the "
                "mesh was given to it, and devices are only described there. Make it before, placed on the mesh "
                "(Program.place, jax.device_put), or in a function that runtime.jit compiles"
            ) from error

    def jit(self, fn: Callable[..., Any], *, more: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Any:
        """`fn` compiled with the target's options, and with `more` of them; `options` are `jax.jit`'s. To be called,
        traced or lowered within `tracing`."""
        return jax.jit(fn, compiler_options={**self.compiler_options, **more}, **options)

    def lower(self, traced: Any) -> Any:
        """A traced function, lowered for the mesh's platform, whichever machine this is."""
        platform = LOWERING_PLATFORM.get(self.placement.platform, self.placement.platform)
        with self.tracing():
            return traced.lower(lowering_platforms=(platform,))

    def abstract(self, specs: Any, placement: Placement | None = None) -> Any:
        """A tree of `ArraySpec`s as `jax.ShapeDtypeStruct`s with shardings: what is traced for, and restored into.

        `placement`: instead of the runtime's own.
        """
        placement = placement or self.placement

        def leaf(spec: ArraySpec) -> jax.ShapeDtypeStruct:
            sharding = placement.sharding(spec.axes, spec.kind)
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

        return jax.tree.map(leaf, specs)

    def step_metrics(self, statistics: Mapping[str, Array]) -> dict[str, Array]:
        """What the modules with a method `step_metrics` report of a step, each given the statistics of its own
        variables by name, those of all layers; the mean over modules."""
        found: dict[str, list[Array]] = {}
        for path, module in self._reporters.items():
            own = {
                variable.rpartition("/")[2]: _without_padding(statistic, self.variables[variable])
                for variable, statistic in statistics.items()
                if variable.rpartition("/")[0] == path
            }
            for name, value in (module.step_metrics(own) if own else {}).items():
                found.setdefault(name, []).append(value)
        return {name: jnp.mean(jnp.stack(values)) for name, values in found.items()}

    def reshard(self, values: Any, kind: str, move: Callable[..., Any] = axes.reshard) -> Any:
        """Parameters, or what is like them, nested by path, each under its row of the table for `kind`."""
        return jax.tree.map(
            lambda spec, value: move(value, self.placement.spec(spec.axes, kind)),
            nested(self.parameters),
            values,
        )


def _without_padding(statistic: Array, spec: ArraySpec) -> Array:
    """Of the layers that there are: all of them on every device, as they need not divide among a pipeline's stages."""
    if spec.unpadded is None:
        return statistic
    return axes.reshard(statistic, PartitionSpec(*(None for _ in statistic.shape)))[: spec.unpadded[0]]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Path → value, as dictionaries within dictionaries."""
    return nnx.traversals.unflatten_mapping({tuple(path.split("/")): value for path, value in flat.items()})


def flattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries within dictionaries, as path → value."""
    return {"/".join(path): value for path, value in nnx.traversals.flatten_mapping(tree).items()}


def _built(model: Any) -> nnx.Module:
    """The module that `model` describes. Raises `UserError` if it builds something else."""
    module = model.build()
    if not isinstance(module, nnx.Module):
        raise UserError(
            f"{type(model).__name__}.build() ({written_at(model.build)}) gives a {type(module).__name__}: expected a "
            "flax.nnx.Module, as axon.nn.LanguageModel around a block of your own"
        )
    return module


def _refuse_foreign(model: str, state: nnx.State) -> None:
    """Raise `UserError` for variables that have no axes."""
    if paths := ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]:
        raise UserError(
            f"{model}.build() gives a module with variables that have no named axes: {', '.join(paths[:5])}. Declare "
            "them as axon.nn.Param, or as axon.nn.Variable if no gradient trains them"
        )


def _first_choices(placement: Placement, options: Mapping[str, Any], without: str) -> dict[str, str]:
    """What was decided before anything is traced; `without`: why there are no options."""
    choices = {}
    if options or without:
        choices["XLA options"] = ", ".join(f"{name}={value}" for name, value in options.items()) or without
    if placement.host:
        choices["host memory"] = f"{' and '.join(placement.host)}, fetched one layer at a time"
    for kind, folder in placement.disk.items():
        choices["disk"] = f"{kind} in files in {folder}, read and written one layer at a time"
    if placement.layout.pad_layers and placement.stages == 1:
        choices["pad_layers"] = "Layout.pad_layers = True pads nothing: the mesh has no stages, the mesh axis 'pipe'"
    zero = placement.layout.zero
    if zero and placement.mesh.size > 1 and placement.mesh.shape.get("data", 1) == 1:
        choices["ZeRO"] = f"stage {zero} splits nothing: it splits over 'data', which the mesh lacks"
    return choices


def _stored(path: str, spec: ParamSpec, operands: Collection[str], dtype: Any) -> ParamSpec:
    """A parameter in `dtype`, unless it is of an operand, which says so itself."""
    return spec if any(path.startswith(f"{one}/") for one in operands) else replace(spec, dtype=dtype)


def _padding_text(layers: int, stored: int) -> str:
    return f"{layers} layers of a kind are stored as {stored}, with {stored - layers} of zeros at the end"
