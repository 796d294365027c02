"""Whether a module and the target's compiler can do what an `Execution` asks for."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axon.axes import Execution
from axon.errors import UserError
from axon.kernels.choice import check_names
from axon.layout import Placement
from axon.nn import Depth, MoE
from axon.nn.remat import check_remat, remat_names


def check_execution(execution: Execution, module: nnx.Module) -> None:
    """Raise `UserError` for names that neither operations nor module have, and for what has no effect on the module."""
    check_names(execution.kernels)
    modules = [one for _, one in nnx.iter_modules(module)]
    kinds: dict[str, set[str]] = {}
    for depth in (one for one in modules if isinstance(one, Depth)):
        for kind, block in depth.blocks.items():
            kinds.setdefault(kind, set()).update(remat_names(block))
    if kinds:
        check_remat(execution.remat, kinds)
    elif execution.remat != "none" or execution.unroll is not None:
        _refuse("remat and Execution.unroll are of the layers of an axon.nn.Depth", module, "Depth")
    if execution.dispatcher != "auto" and not any(isinstance(one, MoE) for one in modules):
        _refuse("dispatcher is of experts, as in axon.nn.MoE", module, "experts")


def check_compiler_options(execution: Execution, placement: Placement) -> None:
    """Raise `UserError` for options that the compiler of the mesh's devices does not take, by a program of no work."""
    if not execution.compiler_options or not placement.devices:
        return
    spec = jax.ShapeDtypeStruct((), jnp.float32, sharding=placement.sharding((), "activations"))
    options: Any = dict(execution.compiler_options)
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(spec).compile()
    except Exception as error:
        raise UserError(
            f"Execution.compiler_options = {options}: the compiler for {placement.platform} refuses them: "
            f"{str(error).splitlines()[0]}. See the options of XLA and of its version, jax {jax.__version__}"
        ) from error


def _refuse(text: str, module: nnx.Module, lacks: str) -> None:
    raise UserError(f"Execution.{text}, and a {type(module).__name__} has no {lacks}: leave it out")
