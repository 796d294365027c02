"""What the backward pass computes again, what it keeps, and what waits in the host's memory, by name."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axon import axes
from axon.axes.execution import ACTIONS, INPUT, OFFLOAD, SAVE, Remat, RematByKind, is_policy
from axon.axes.memory import HOST, check_host_memory
from axon.errors import UserError, suggest
from axon.nn.capabilities import NamesActivations

_saved_names: ContextVar[Collection[str] | None] = ContextVar("saved_names", default=None)
"""The activations that the policy saves or offloads under which a block is being traced; None: all of them."""


def check_remat(remat: RematByKind, names: Mapping[str, Collection[str]]) -> None:
    """Raise `UserError` for a kind of block or an activation that a policy names and the model does not have.

    `names`: kind → the names of activations that its modules declare.
    """
    by_kind: Any = remat
    if is_policy(remat):
        _check_names(by_kind, set().union(*names.values()))
        return
    for kind, policy in by_kind.items():
        if kind not in names:
            known = [*names, *set().union(*names.values())]
            raise UserError(f"Execution.remat: no kind of block or activation is named {kind!r}.{suggest(kind, known)}")
        _check_names(policy, names[kind])


def _check_names(policy: Remat, names: Collection[str]) -> None:
    if isinstance(policy, str):
        return
    known = [*names, INPUT] if isinstance(policy, Mapping) else names
    for name in policy:
        if name not in known:
            raise UserError(f"Execution.remat: no activation is named {name!r}.{suggest(name, known)}")


def remat_of(kind: str) -> Remat:
    """The policy of a kind of block, in the execution in force."""
    remat: Any = axes.execution().remat
    return remat if is_policy(remat) else remat.get(kind, "none")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))


def remat_names(block: nnx.Module) -> set[str]:
    """The names that a block's modules give to activations, in their attribute `remat_names`."""
    modules = (module for _, module in nnx.iter_modules(block) if isinstance(module, NamesActivations))
    return {name for module in modules for name in module.remat_names}


def offloaded(remat: Remat) -> list[str]:
    """The activations that a policy offloads."""
    return [n for n, action in remat.items() if action == OFFLOAD] if isinstance(remat, Mapping) else []


def keeps_more(remat: Remat) -> bool:
    """Whether a policy keeps more of a block on the device than its input."""
    if isinstance(remat, Mapping):
        return any(action == SAVE for name, action in remat.items() if name != INPUT)
    return remat not in ("full", ())


def describe(remat: Remat) -> str:
    """A policy in words, for the log of choices: `save attention, offload gate + input`."""
    if not isinstance(remat, Mapping):
        return str(remat)
    by_action = {action: [n for n, a in remat.items() if a == action] for action in ACTIONS}
    return ", ".join(f"{action} {' + '.join(names)}" for action, names in by_action.items() if names)


def recomputed(name: str) -> bool:
    """Whether the backward computes the activation of this name again, in the block that is being traced."""
    names = _saved_names.get()
    return names is not None and name not in names


def with_remat(layer: Callable[..., Any], remat: Remat, block: nnx.Module, in_scan: bool) -> Callable[..., Any]:
    """`layer`, a call of `block` whose first argument is the block's input, differentiated under the policy."""
    if remat == "none":
        return layer
    to_host, saved = offloaded(remat), _saved(remat, block)
    layer = _with_saved_names((*saved, *to_host), layer)
    if not to_host:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)
    check_host_memory(f"Execution.remat: {_listed(to_host)} cannot be offloaded, only saved or recomputed")
    axes.log_choice("offload", f"{', '.join(to_host)} of each layer to {HOST}")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=to_host,
        offload_src="device",
        offload_dst=HOST,
    )
    return jax.checkpoint(_with_named_input(layer), policy=policy, prevent_cse=not in_scan)


def _saved(remat: Remat, block: nnx.Module) -> list[str]:
    if isinstance(remat, Mapping):
        return [name for name, action in remat.items() if action == SAVE]
    if isinstance(remat, str):
        return {"full": [], "minimal": sorted(remat_names(block))}[remat]
    return list(remat)


def _with_saved_names(names: Collection[str], layer: Callable[..., Any]) -> Callable[..., Any]:
    """`layer`, traced where `recomputed` knows that these activations are not."""

    def traced(*arguments: Any) -> Any:
        before = _saved_names.set(names)
        try:
            return layer(*arguments)
        finally:
            _saved_names.reset(before)

    return traced


def _with_named_input(layer: Callable[..., Any]) -> Callable[..., Any]:
    """`layer` with a name for its first argument, which the policy can then offload: arguments are kept where they
    are."""

    def named(x: jax.Array, *others: Any) -> Any:
        return layer(checkpoint_name(x, INPUT), *others)

    return named
