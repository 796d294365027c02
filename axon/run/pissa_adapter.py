"""The factors of a run that began as PiSSA, beside the whole weights of its model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from axon.checkpoint.huggingface.model import HubModel
from axon.errors import UserError
from axon.nn.lora import LoRA
from axon.runtime import Runtime

TOLERANCE = 1e-3
"""By how much of its largest number a run's base may differ from what remains of the model's weights."""


def beside_whole_weights(
    run: str, lora: LoRA, own: Runtime, values: Mapping[str, Any], hub: HubModel
) -> tuple[LoRA, Runtime, dict[str, Any]]:
    """LoRA of twice the rank, a runtime with it, and its factors by path: A·B − A₀·B₀ = [A A₀]·[B; −B₀], where A₀ and
    B₀ are what the run began with, made of the model's weights again (PEFT's conversion).

    `own`: the run's runtime; `values`: its parameters by path. Raises `UserError` for a base in few bits, and for one
    that is not of the weights of `hub`.
    """
    if len(own.transforms) > 1:
        raise UserError(
            f"{run} began as PiSSA over {own.transforms[0].text}, and its adapters are of those weights alone: merge "
            f"it, axon convert {run} hf:DIR"
        )
    growth = 2**0.5 if lora.rank_stabilized else 2
    plain = replace(lora, rank=2 * lora.rank, alpha=growth * lora.alpha, init="normal", pissa_iterations=None)
    wide = Runtime(own.model, own.layout, placement=own.placement, transforms=(plain,))
    joined = dict(values)
    for path in own.operands:
        whole = hub.load_arrays(own.abstract({path: own.declared[path]}))[path]
        begun = {name: np.asarray(part) for name, part in own.derived(path, whole).items()}
        base = np.asarray(values[f"{path}/base"], np.float32)
        if np.max(np.abs(begun["base"] - base)) > TOLERANCE * np.max(np.abs(base)):
            raise UserError(
                f"{path} of {run} did not begin as PiSSA of {hub.name}, or is decomposed otherwise here, as where two "
                f"singular values are nearly equal: name the model that it began from, --base, or merge it, axon "
                f"convert {run} hf:DIR"
            )
        for factor, sign in (("a", 1), ("b", -1)):
            axis = own.parameters[f"{path}/{factor}"].axes.index("rank")
            now = np.asarray(values[f"{path}/{factor}"])
            joined[f"{path}/{factor}"] = np.concatenate([now, sign * begun[factor]], axis)
    return plain, wide, joined
