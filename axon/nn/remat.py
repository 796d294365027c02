"""What the backward pass computes again, what it keeps, and what waits in the host's memory, by name."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axon import axes
from axon.axes.memory import HOST, check_host_memory
from axon.errors import UserError, suggest

POLICIES = ("none", "full", "minimal")

SAVE, RECOMPUTE, OFFLOAD = ACTIONS = ("save", "recompute", "offload")
"""What becomes of an activation between forward and backward: "save" keeps it on the device, "recompute" computes it
again, "offload" sends it to the host's memory and fetches it back."""

INPUT = "input"
"""The name of a block's own input, which every policy keeps, and which can be offloaded."""

Remat = str | tuple[str, ...] | Mapping[str, str]
"""What the backward recomputes of a block. "none": nothing; "full": all but the block's input; "minimal": all but the
activations that its modules name (`remat_names`: matmul outputs and attention); a tuple of the names to keep; or a
mapping from names to `ACTIONS`, in which names left out are recomputed, and "input" is the block's input."""

RematByKind = Remat | Mapping[str, Remat]
"""One policy for all kinds of block, or kind → policy. A mapping whose values are actions is one policy."""

_saved_names: ContextVar[Collection[str] | None] = ContextVar("saved_names", default=None)
"""The activations that the policy saves or offloads under which a block is being traced; None: all of them."""


def remat_by_kind(remat: RematByKind, names: Mapping[str, Collection[str]]) -> dict[str, Remat]:
    """The policy of each kind of block: `remat` for all, or by kind, "none" for those left out.

    Args:
        names: kind → the names of activations that its modules declare.

    Raises `UserError` for an unknown kind, policy, action or name.
    """
    policies: Any = remat
    if not isinstance(remat, Mapping) or _is_policy(remat, names):
        one: Remat = policies
        _check(one, set().union(*names.values()))
        return dict.fromkeys(names, one)
    for kind, policy in policies.items():
        if kind not in names:
            raise UserError(f"remat: no kind of block is named {kind!r}.{suggest(kind, names)}")
        _check(policy, names[kind])
    return {kind: policies.get(kind, "none") for kind in names}


def _is_policy(remat: Mapping[str, Any], names: Mapping[str, Collection[str]]) -> bool:
    """Whether a mapping is from names to actions, and not from kinds to policies."""
    if not remat:
        raise UserError("remat = {} names nothing: write 'none' to recompute nothing, or 'full' to recompute all")
    activations = {INPUT}.union(*names.values()).difference(names)
    return any(isinstance(value, str) and value in ACTIONS for value in remat.values()) or activations >= remat.keys()


def _check(remat: Remat, names: Collection[str]) -> None:
    if isinstance(remat, str):
        if remat not in POLICIES:
            raise UserError(f"unknown remat policy {remat!r}.{suggest(remat, POLICIES)} Or give a tuple of names")
        return
    if isinstance(remat, Mapping):
        _check_actions(remat)
    known = [*names, INPUT] if isinstance(remat, Mapping) else names
    for name in remat:
        if name not in known:
            raise UserError(f"remat: no activation is named {name!r}.{suggest(name, known)}")


def _check_actions(remat: Mapping[str, str]) -> None:
    for name, action in remat.items():
        if action not in ACTIONS:
            raise UserError(
                f"remat: {name!r} is mapped to the unknown action {action!r}.{suggest(str(action), ACTIONS)} A "
                "mapping is from names of activations to actions, or from kinds of block to policies"
            )
    if remat.get(INPUT) == RECOMPUTE:
        raise UserError("remat: a block's input cannot be recomputed, only saved (as it is by default) or offloaded")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))


def remat_names(block: nnx.Module) -> set[str]:
    """The names that a block's modules give to activations, in their attribute `remat_names`."""
    return {name for _, module in nnx.iter_modules(block) for name in getattr(module, "remat_names", ())}


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
    check_host_memory(f"remat: {_listed(to_host)} cannot be offloaded, only saved or recomputed")
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
