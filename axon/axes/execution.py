"""How a program is carried out: all that changes a result by no more than rounding."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from axon.composition import ACROSS_LAYERS, HOST, REPLAYS, REPLICAS, SKIPS, STAGES, Part
from axon.disk import check_paths
from axon.errors import UserError, suggest
from axon.fields import FolderPath

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
"""One policy for all kinds of block, or kind → policy. A mapping that has actions as values is one policy."""

DISPATCHERS = ("auto", "dense", "padded", "ragged")
"""How tokens get to their experts: "ragged" (`ragged_all_to_all`: TPUs and GPUs), "padded" (`all_to_all`), "dense"
(every expert works on every token: the plain reference), "auto" the first of these that the platform has."""

ON_HOST = ("params", "optimizer")
"""The kinds of array that can be stored in the host's memory."""

ON_DISK = ("optimizer",)
"""The kinds of array that can be stored in files."""


@dataclass(frozen=True)
class Execution:
    """How a run is carried out, beside its model, which says what is computed, and its `Layout`, which says where.

    Nothing of it changes a result by more than rounding: all of it may change when a run is continued.

    Args:
        remat: what the backward recomputes, keeps or offloads of a block, of all kinds or by kind: see `RematByKind`.
        unroll: run the layers one by one, rather than scan a segment's periods; None: up to 16 layers of a pipeline's
            chunk, and on CPU, without a cache. (With one there are few tokens; to cut all layers' weights out of their
            stack, which a scan need not, takes longer than to multiply by them.) A segment of one period is always
            unrolled.
        kernels: implementations by operation, as `{'attention': 'xla'}`; the others are chosen, and reported.
        dispatcher: how tokens get to their experts, one of `DISPATCHERS`. capacity_factor: for how much more than the
            balanced load a device has buffers. What is beyond takes overflow rounds: no token is lost.
        host: kinds of array that are stored in the host's memory, and are on a device one layer at a time:
            ("optimizer",).
        disk: kind of array → folder, on a local disk, in whose files arrays of the kind are stored; one layer at a time
            is in memory: {"optimizer": "/mnt/nvme"}. The files are scratch: each process deletes its own at the end.
        compiler_options: XLA's, by name, over those of the chip.
    """

    remat: RematByKind = "none"
    unroll: bool | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    dispatcher: str = "auto"
    capacity_factor: float = 1.5
    host: tuple[str, ...] = ()
    disk: Mapping[str, FolderPath] = field(default_factory=dict)
    compiler_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def __post_init__(self):
        check_paths(self)
        _check_policies(self.remat)
        if self.dispatcher not in DISPATCHERS:
            raise UserError(
                f"Execution.dispatcher: unknown dispatcher {self.dispatcher!r}.{suggest(self.dispatcher, DISPATCHERS)}"
            )
        if not 1 <= self.capacity_factor < math.inf:
            raise UserError(
                f"Execution.capacity_factor is {self.capacity_factor}; must be at least 1, the room for a balanced load"
            )
        if len(set(self.host)) < len(self.host):
            raise UserError(f"Execution.host = {self.host} names a kind of array more than once: name each once")
        for name, kinds, able in (("host", self.host, ON_HOST), ("disk", self.disk, ON_DISK)):
            for kind in kinds:
                if kind not in able:
                    raise UserError(f"Execution.{name}: {kind!r} cannot be stored there.{suggest(kind, able)}")
        if both := set(self.host) & set(self.disk):
            raise UserError(
                f"{min(both)!r} is in both Execution.host, the host's memory, and Execution.disk: choose one. Take it "
                "out of Execution.host, or set Execution.disk to {}"
            )

    @property
    def on_devices(self) -> "Execution":
        """The same with all arrays on the devices, none in the host's memory or on a disk."""
        return replace(self, host=(), disk={})

    @property
    def composition(self) -> tuple[Part, ...]:
        """The tiers that store arrays outside of devices: see `axon.composition`."""
        by_layer = {
            ACROSS_LAYERS: "it updates one layer at a time, and the optimizer does not say that it updates each "
            "layer by itself (by_layer = True)",
            REPLICAS: "a state of each replica cannot be updated one layer at a time yet",
            SKIPS: "an update that is made one layer at a time cannot be skipped as a whole",
            REPLAYS: "it updates its arrays in place, one layer at a time, so that a step cannot be done twice",
        }
        from_files = {STAGES: "a pipeline's stages cannot update from files yet"}
        host = Part(f"Execution.host = {self.host}", "set Execution.host to ()", frozenset({HOST}), by_layer)
        disk = Part(f"Execution.disk = {dict(self.disk)}", "set Execution.disk to {}", excludes=by_layer | from_files)
        return (host,) * bool(self.host) + (disk,) * bool(self.disk)


def is_policy(remat: RematByKind) -> bool:
    """Whether it is one policy for all kinds of block, and not kind → policy."""
    return not isinstance(remat, Mapping) or any(isinstance(one, str) and one in ACTIONS for one in remat.values())


def policies(remat: RematByKind) -> list[Remat]:
    """The policies that it names: one for all kinds of block, or each kind's."""
    by_kind: Any = remat
    return [by_kind] if is_policy(remat) else [*by_kind.values()]


def _check_policies(remat: RematByKind) -> None:
    """Raise `UserError` for a policy or action that there is not; names are the model's, and checked with it."""
    if isinstance(remat, Mapping) and not remat:
        raise UserError(
            "Execution.remat = {} names nothing: write 'none' to recompute nothing, or 'full' to recompute all"
        )
    known = (*POLICIES, *ACTIONS) if isinstance(remat, Mapping) else POLICIES
    for policy in policies(remat):
        _check_policy(policy, known)


def _check_policy(policy: Remat, known: Collection[str]) -> None:
    if isinstance(policy, str) and policy not in POLICIES:
        raise UserError(
            f"Execution.remat: unknown remat policy {policy!r}.{suggest(policy, known)} Or give a tuple of names"
        )
    if not isinstance(policy, Mapping):
        return
    for name, action in policy.items():
        if action not in ACTIONS:
            raise UserError(
                f"Execution.remat: {name!r} is mapped to the unknown action {action!r}.{suggest(str(action), ACTIONS)} "
                "A mapping is from names of activations to actions, or from kinds of block to policies"
            )
    if policy.get(INPUT) == RECOMPUTE:
        raise UserError(
            "Execution.remat: a block's input cannot be recomputed, only saved (as it is by default) or offloaded"
        )
