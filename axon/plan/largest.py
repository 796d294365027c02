"""The largest arrays on one device: of a model's parameters, and of the arrays of a traced program."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from axon.axes.specs import mesh_axes_of
from axon.plan.flops import bodies_of
from axon.plan.memory import gib
from axon.train.step import Program


def largest_parameters(program: Program, count: int = 3) -> list[str]:
    """The largest parameters, each with its sizes."""

    def described(path: str) -> str:
        spec = program.parameters[path]
        shape = " × ".join(f"{name} {size:,}" for name, size in zip(spec.axes, spec.shape, strict=True))
        return f"{gib(sizes[path])} GiB {path}: {shape}"

    sizes = {path: program.placement.bytes_per_device(spec) for path, spec in program.parameters.items()}
    return [described(path) for path in sorted(sizes, key=sizes.__getitem__, reverse=True)[:count]]


def largest_traced(jaxpr: core.Jaxpr, count: int = 5) -> list[str]:
    """The largest arrays of a traced step, as one device holds them, each with the operation that makes it.

    What the compiler fuses away is among them.
    """
    sizes_by_text = {text: size for equation in _equations(jaxpr) for text, size in _results(equation)}
    ranked = sorted(sizes_by_text.items(), key=lambda item: -item[1])[:count]
    return [f"{gib(size)} GiB {text}" for text, size in ranked]


def _equations(jaxpr: core.Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        inner = [] if equation.primitive.name == "pallas_call" else list(bodies_of(equation.params))
        yield from (found for body in inner for found in _equations(body))
        if not inner:
            yield equation


def _results(equation: Any) -> Iterator[tuple[str, int]]:
    """Text and bytes on a device of each result: a global array is divided by what splits it."""
    for variable in equation.outvars:
        array = variable.aval
        if hasattr(array, "sharding") and hasattr(array.dtype, "itemsize"):
            sizes = array.sharding.mesh.shape
            num_shards = math.prod(sizes[axis] for axis in mesh_axes_of(array.sharding.spec.partitions))
            shape = ",".join(map(str, array.shape))
            text = f"{array.dtype}[{shape}] of {equation.primitive.name}" + (
                f", split {num_shards}-way" if num_shards > 1 else ""
            )
            yield text, array.size * array.dtype.itemsize // num_shards
