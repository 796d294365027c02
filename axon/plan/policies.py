"""The remat policies that are proposed to a run, by the names that its modules give to activations."""

from collections.abc import Collection, Iterable, Mapping

from flax import nnx

from axon.axes.execution import INPUT, OFFLOAD, SAVE, Remat
from axon.nn.capabilities import NamesActivations
from axon.train.step import Program


def policies_of(program: Program) -> list[Remat]:
    """The remat policies worth trying: none, full, minimal, and minimal without the names of one kind of module."""
    by_module = names_by_module(program)
    names = set().union(*by_module.values())
    some = {tuple(sorted(names - own)) for own in by_module.values() if own != names and len(own) > 1}
    return ["none", "minimal", *sorted(some), "full"]


def offloads_of(names: Collection[str], policies: Iterable[Remat]) -> list[Mapping[str, str]]:
    """The policies worth trying that send to the host what those given compute again: all that modules name but what a
    tuple keeps, all of it and a block's input, and the input alone."""
    kept = [set(one) for one in policies if isinstance(one, tuple)]
    some = [{name: SAVE if name in own else OFFLOAD for name in sorted(names)} for own in kept]
    return [*some, dict.fromkeys([*sorted(names), INPUT], OFFLOAD), {INPUT: OFFLOAD}]


def names_by_module(program: Program) -> dict[str, set[str]]:
    """Class of a block's modules → the activations that they name."""
    found: dict[str, set[str]] = {}
    for block in program.module.layers.blocks.values():
        for _, module in nnx.iter_modules(block):
            if isinstance(module, NamesActivations):
                found.setdefault(type(module).__name__, set()).update(module.remat_names)
    return found
