"""One training step: a pure function of a state and a batch, compiled for a layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from axon import axes
from axon.axes.patterns import parse_names
from axon.axes.specs import mesh_axes_of
from axon.errors import UserError
from axon.kernels.choice import check_names
from axon.layout import ArraySpec, Layout, Placement, validate
from axon.nn import Inputs, LanguageModel, Param, initialise, parameters
from axon.nn.language_model import RESIDUAL
from axon.precision import Precision
from axon.runtime.options import compiler_options
from axon.train import feed
from axon.train.optimizer import AdamW

BATCH = ("batch", "seq")


def _built(model: Any) -> LanguageModel:
    """The module that `model` describes. Raises `UserError` if it builds something else."""
    module = model.build()
    if not isinstance(module, LanguageModel):
        raise UserError(
            f"{type(model).__name__}.build() gives a {type(module).__name__}: expected an axon.nn.LanguageModel, or a "
            "class derived from it, made of a block of your own"
        )
    return module


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step changes: the step's number, the parameters by path, and the optimizer's state.

    `outer` is what an outer method keeps besides (`axon.train.outer`), and None without one.
    Leaves are arrays, or their `jax.ShapeDtypeStruct`.
    """

    step: Any
    parameters: dict[str, Any]
    optimizer: Any
    outer: Any = None


class Program:
    """A model, an optimizer and a layout, as compiled functions: `init`, `step`, `evaluate`.

    Args:
        model: a config that builds the module, as `models.llama.Llama`.
        batch, seq: shape of the global batch, in rows and positions.
        devices: those of the mesh, all there are by default; or those of a described topology, to compile for.
        placement: instead of devices, the layout on a mesh that is only described, to trace for.

    Raises `LayoutError`, before anything is traced, if the layout cannot hold the model.
    """

    replicas = 1
    """Parts of the state that differ along the mesh axis `replica`: see `axon.train.outer` and `axon.train.onebit`."""

    def __init__(
        self,
        model: Any,
        layout: Layout,
        optimizer: AdamW,
        *,
        batch: int,
        seq: int,
        precision: Precision | None = None,
        seed: int = 0,
        z_loss: float = 0.0,
        kernels: Mapping[str, str] | None = None,
        devices: Sequence[Any] | None = None,
        placement: Placement | None = None,
    ):
        self.placement = placement or Placement.of(layout, devices)
        self.module = _built(model)
        self.parameters = parameters(self.module)
        self._graph, declared = nnx.split(self.module, Param)
        declared = nnx.to_flat_state(declared)
        self._paths = dict(zip(self.parameters, (path for path, _ in declared), strict=True))
        self.layout, self.optimizer, self.seed, self.z_loss = layout, optimizer, seed, z_loss
        self.batch, self.seq = batch, seq
        residual = ArraySpec(parse_names(RESIDUAL), (batch, seq, self.module.dims["embed"]))
        validate(self.placement, self.parameters, ArraySpec(BATCH, (batch, seq)), residual, lambda: self.axes_used)
        self.precision = precision or Precision()
        self.kernels = dict(kernels or {})
        check_names(self.kernels)
        self.compiler_options = compiler_options(self.placement.devices)
        self.choices: dict[str, str] = {}
        if self.compiler_options:
            self.choices["XLA options"] = ", ".join(f"{n}={v}" for n, v in self.compiler_options.items())
        if layout.zero and self.placement.mesh.size > 1 and self.placement.mesh.shape.get("data", 1) == 1:
            self.choices["ZeRO"] = f"stage {layout.zero} splits nothing: it splits over 'data', which the mesh has not"
        self._decayed = _nested({path: p.decay for path, p in declared})
        self._transform = optimizer.transform(self._decayed)
        self._schedule = optimizer.schedule.function()

    # ---- what a person calls --------------------------------------------------------------------------------------

    def init(self, parameters: Any = None) -> State:
        """The state at step 0, made sharded: with initial values, the same bits on every layout, or with `parameters`.

        `parameters` is a tree like `abstract_state().parameters`.
        """
        values = initialise(self.module, self.seed, self.placement)[0] if parameters is None else parameters
        shardings = jax.tree.map(lambda a: a.sharding, self.abstract_state())
        with self.tracing():
            return jax.jit(lambda values: self._begin(values), out_shardings=shardings)(values)

    def step(self, state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        """The next state, and the metrics of this step, as device scalars over the global batch.

        `loss` in nats per real token, `grad_norm` before clipping, `learning_rate`, `tokens`, and `norms`: the squared
        norm of each parameter's gradient, in the order of `self.parameters`. The old state's memory is reused.
        """
        with self.tracing():
            return self._step(state, batch)

    def evaluate(self, parameters: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        """`nll`, the summed loss in nats, and `tokens`, the real ones, of a batch."""
        with self.tracing():
            return self._evaluate(parameters, batch)

    def place(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """The rows of the global batch that this process holds (`host_rows`), `batch seq`, as sharded arrays."""
        return feed.place(self.placement.sharding(BATCH), dict(batch), self.host_rows, self.batch)

    def trace(self) -> Any:
        """The step, traced for abstract arguments: `.jaxpr` is what a FLOP counter reads."""
        state, batch = self.abstract_state(), self.abstract_batch()
        with self.tracing():
            return self._step.trace(state, batch)

    def lower(self) -> Any:
        """The step, traced and lowered for abstract arguments: `.compile()` it for the mesh's devices."""
        # A described GPU has no backend to ask what "gpu" means here.
        platform = {"gpu": "cuda"}.get(self.placement.platform, self.placement.platform)
        traced = self.trace()
        with self.tracing():
            return traced.lower(lowering_platforms=(platform,))

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of `init()`: what a checkpoint is restored into."""
        values = self._tree(lambda spec: self._abstract(spec, "params"))
        of_optimizer = self._tree(lambda spec: self._abstract(spec, "optimizer"))
        whole = NamedSharding(self.placement.mesh, PartitionSpec())

        def scalar(spec):
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=whole)

        optimizer = optax.tree_utils.tree_map_params(
            self._transform,
            lambda s, like: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=like.sharding),
            jax.eval_shape(self._transform.init, values),
            of_optimizer,
            transform_non_params=scalar,
        )
        return State(scalar(jax.ShapeDtypeStruct((), jnp.int32)), values, optimizer)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        sharding = self.placement.sharding(BATCH)
        integers = ("tokens", "targets", "positions", "documents")
        dtypes = dict.fromkeys(integers, jnp.int32) | {"weights": jnp.float32}
        return {n: jax.ShapeDtypeStruct((self.batch, self.seq), d, sharding=sharding) for n, d in dtypes.items()}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """This program's mesh, precision and layout in force."""
        compute = self.precision.compute_dtype(self.placement.platform)
        scope = axes.Scope(self.placement, compute, self.precision.reduce_dtype, self.kernels, self.choices)
        with jax.sharding.use_abstract_mesh(self.placement.mesh.abstract_mesh), axes.activate(scope):
            yield

    @cached_property
    def host_rows(self) -> np.ndarray:
        """Numbers of the rows of the global batch that this process has to read: all of them in a run of one."""
        return feed.host_rows(self.placement.sharding(BATCH), (self.batch, self.seq))

    @cached_property
    def axes_used(self) -> frozenset[str]:
        """The axes of parameters and batch, and all that the model's patterns name: it is traced to see them."""

        def loss(values, tokens, weights):
            key, rows = jax.random.key(self.seed), jnp.arange(self.batch)
            inputs = Inputs(tokens, tokens, tokens, key=key, rows=rows)
            return self.bind(values).loss(inputs, tokens, weights)

        values = self._tree(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype))
        tokens, weights = (jax.ShapeDtypeStruct((self.batch, self.seq), dtype) for dtype in (jnp.int32, jnp.float32))
        declared = {name for spec in self.parameters.values() for name in spec.axes}.union(BATCH)
        return axes.axes_used(loss, values, tokens, weights) | declared

    # ---- the step -------------------------------------------------------------------------------------------------

    @cached_property
    def _step(self):
        return jax.jit(self._train, donate_argnums=0, compiler_options=self.compiler_options)

    @cached_property
    def _evaluate(self):
        def evaluate(values, batch):
            _, nll = self.bind(values).loss(_inputs(batch), batch["targets"], batch["weights"])
            return {"nll": nll, "tokens": jnp.sum(batch["weights"])}

        return jax.jit(evaluate)

    def bind(self, values: Mapping[str, Any]) -> Any:
        """The module with these parameters."""
        return nnx.merge(self._graph, values)

    def _begin(self, values: Any) -> State:
        return State(jnp.zeros((), jnp.int32), values, self._transform.init(values))

    def _train(self, state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        return self._update(state, self._with_rows(batch))

    def _with_rows(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """A batch that knows which row of the global batch each of its rows is."""
        return {**batch, "rows": axes.shard(jnp.arange(self.batch, dtype=jnp.int32), "batch")}

    def _update(self, state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        """The step on all rows of `batch`, which are those of the global batch or of one replica's share."""
        tokens = jnp.sum(batch["weights"])
        gradients, loss = self._gradients(state, batch, tokens)
        gradients, norms = self._clipped(gradients)
        values = self._moved(state.parameters, "optimizer")
        updates, optimizer = self._transform.update(self._moved(gradients, "optimizer"), state.optimizer, values)
        values = self._moved(optax.apply_updates(values, updates), "params")
        return State(state.step + 1, values, optimizer), self._metrics(state, loss, tokens, norms)

    def _metrics(self, state: State, loss: Array, tokens: Array, norms: Array) -> dict[str, Array]:
        """What a step tells: `norms` are the squared norms of the gradients by parameter, before clipping."""
        return {
            "loss": loss,
            "grad_norm": jnp.sqrt(jnp.sum(norms)),
            "learning_rate": jnp.asarray(self._schedule(state.step), jnp.float32),
            "tokens": tokens,
            "norms": norms,
        }

    def _clipped(self, gradients: Any) -> tuple[Any, Array]:
        """Gradients of a global norm of `optimizer.clip` at most, and their squared norms by parameter before that."""
        norms = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)])
        if self.optimizer.clip is not None:
            factor = jnp.minimum(1.0, self.optimizer.clip / (jnp.sqrt(jnp.sum(norms)) + 1e-6))
            gradients = jax.tree.map(lambda g: g * factor, gradients)
        return gradients, norms

    def _gradients(self, state: State, batch: Mapping[str, Array], tokens: Array) -> tuple[Any, Array]:
        """Gradients of the mean loss under the `grads` rows, reduced once, and that loss in nats per token."""
        values = self.with_deferred_gradients(state.parameters)
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        batch = {**batch, "weights": batch["weights"] / jnp.where(tokens > 0, tokens, 1)}

        def loss(values, part):
            inputs = _inputs(part, key, part["rows"])
            return self.bind(values).loss(inputs, part["targets"], part["weights"], self.z_loss)

        differentiated = jax.value_and_grad(loss, has_aux=True)
        if self.layout.microbatches == 1:
            (_, nll), gradients = differentiated(values, batch)
        else:
            gradients, nll = self._accumulated(differentiated, values, batch)
        self._tell_overlap()
        return self._moved(gradients, "grads"), nll

    def _accumulated(self, differentiated: Callable[..., Any], values: Any, batch: Mapping[str, Array]) -> Any:
        """Gradients and loss, summed over the microbatches of `batch`."""

        def accumulate(sums, part):
            (_, nll), gradients = differentiated(values, part)
            return jax.tree.map(jnp.add, sums, (gradients, nll)), None

        zeros = jax.tree.map(lambda v: axes.as_cotangent(jnp.zeros(v.shape, v.dtype), v), values)
        parts = {name: _microbatches(value, self.layout.microbatches) for name, value in batch.items()}
        return jax.lax.scan(accumulate, (zeros, jnp.zeros((), jnp.float32)), parts)[0]

    def _tell_overlap(self) -> None:
        """Leave word of the mesh axes of `Layout.overlap` over which tracing the gradients made no ring."""
        scope, sizes = axes.current(), self.placement.mesh.shape
        idle = [a for a in self.placement.overlap if sizes.get(a, 1) > 1 and scope and a not in scope.rings]
        if idle:
            axes.log_choice(
                "overlap",
                f"nothing is overlapped over {' and '.join(map(repr, idle))}: no matmul gathers an activation over it, "
                "or scatters one (a weight's gather, as ZeRO's, makes no ring). Take it out of Layout.overlap; for "
                "'tensor', add rows=sequence_parallel()",
            )

    def with_deferred_gradients(self, values: Any) -> Any:
        """Parameters whose gradients stay partial sums over the devices that split the batch, until they are moved."""
        if not axes.supports_unreduced():
            return values
        split = {a for name in BATCH for a in self.placement.mesh_axes(name)}

        def owing(value):
            spec = jax.typeof(value).sharding.spec
            return axes.reshard(value, PartitionSpec(*spec, reduced=frozenset(split.difference(mesh_axes_of(spec)))))

        return jax.tree.map(owing, values)

    def _moved(self, values: Any, kind: str) -> Any:
        """A tree like the parameters, each under its row of the table for `kind`."""
        specs = self._tree(lambda spec: self.placement.spec(spec.axes, kind))
        return jax.tree.map(axes.reshard, values, specs)

    def _tree(self, fn: Callable[[ArraySpec], Any]) -> Any:
        """A tree like the parameters, of what `fn` makes of each one's specification."""
        return _nested({self._paths[path]: fn(spec) for path, spec in self.parameters.items()})

    def _abstract(self, spec: ArraySpec, kind: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=self.placement.sharding(spec.axes, kind))


def _inputs(batch: Mapping[str, Array], key: Array | None = None, rows: Array | None = None) -> Inputs:
    return Inputs(batch["tokens"], batch["positions"], batch["documents"], key=key, rows=rows)


def _microbatches(x: Array, count: int) -> Array:
    """`batch …` → `micro batch …`, strided, so that every device keeps its own rows."""
    x = x.reshape(x.shape[0] // count, count, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1)


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    return nnx.traversals.unflatten_mapping(flat)
