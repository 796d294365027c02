"""What the backward pass computes again, and what it keeps, by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from axon.errors import UserError, suggest

POLICIES = ("none", "full", "minimal")

Remat = str | tuple[str, ...]
"""What the backward recomputes of a block. "none": nothing; "full": all but the block's input; "minimal": all but the
activations that its modules name (`remat_names`: matmul outputs and attention); or a tuple of the names to keep."""


def check_remat(remat: Remat, names: Iterable[str]) -> None:
    """Raise `UserError` for a policy that does not exist, or a name that is none of `names`."""
    if isinstance(remat, str):
        if remat not in POLICIES:
            raise UserError(f"unknown remat policy {remat!r}.{suggest(remat, POLICIES)} Or give a tuple of names")
        return
    for name in remat:
        if name not in names:
            raise UserError(f"remat: no activation is named {name!r}.{suggest(name, names)}")


def remat_by_kind(remat: Remat | Mapping[str, Remat], blocks: Mapping[str, nnx.Module]) -> dict[str, Remat]:
    """The policy of each kind of block: `remat` for all, or by kind, "none" for those left out.

    Raises `UserError` for an unknown kind, policy or name: the names of a kind are those that its modules declare.
    """
    names = {kind: remat_names(block) for kind, block in blocks.items()}
    if not isinstance(remat, Mapping):
        check_remat(remat, set().union(*names.values()))
        return dict.fromkeys(blocks, remat)
    for kind, one in remat.items():
        if kind not in blocks:
            raise UserError(f"remat: no kind of block is named {kind!r}.{suggest(kind, blocks)}")
        check_remat(one, names[kind])
    return {kind: remat.get(kind, "none") for kind in blocks}


def remat_names(block: nnx.Module) -> set[str]:
    """The names that a block's modules give to activations, in their attribute `remat_names`."""
    return {name for _, module in nnx.iter_modules(block) for name in getattr(module, "remat_names", ())}


def with_remat(layer: Callable[..., Any], remat: Remat, block: nnx.Module, in_scan: bool) -> Callable[..., Any]:
    """`layer`, a call of `block`, differentiated under the policy."""
    if remat == "none":
        return layer
    kept = {"full": (), "minimal": remat_names(block)}[remat] if isinstance(remat, str) else remat
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_scan)
