"""A model without an adapter: of a run the weights beside which it trains, of a merged folder the difference."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from axon.checkpoint.huggingface.hub import CONFIG, copy_companions
from axon.checkpoint.huggingface.model import open_unmerged
from axon.checkpoint.huggingface.save import Entry, write_weights
from axon.disk import atomic_folder
from axon.errors import UserError
from axon.nn.lora import LoRA
from axon.run.trained import TrainedRun
from axon.runtime import Runtime, flattened, nested


def weights_beside(trained: TrainedRun, runtime: Runtime) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and variables of a run of LoRA without its adapters, nested by path: as the run keeps them, bit for
    bit. Raises `UserError` for a run that has changed them."""
    run, loras = str(trained.folder.path), [one for one in trained.train.weight_transforms if isinstance(one, LoRA)]
    if not loras:
        raise UserError(f"--without {run}: it has no LoRA in Train.transforms, so there is no adapter to leave out")
    for lora in loras:
        if lora.others or not lora.keeps_weights:
            what = f"trained {lora.others} (LoRA.others)" if lora.others else "took a part of the weights (PiSSA)"
            raise UserError(
                f"--without {run}: it {what}, and does not keep what they were: name the model that it began from"
            )
    own, nested_values, variables = trained.unmerged(runtime)
    plain = tuple(replace(one, dora=False, adapters=()) if isinstance(one, LoRA) else one for one in own.transforms)
    beside = Runtime(own.model, own.layout, placement=own.placement, execution=own.execution, transforms=plain)
    values = flattened(nested_values)
    added = [path for path in beside.parameters if path.endswith(("/a", "/b"))]
    values |= {path: np.zeros(beside.parameters[path].shape, np.float32) for path in added}
    return nested(beside.merged(values)), variables


def unmerge(source: str, adapter: str, out: Path, report: Callable[[str], None], shard: int) -> None:
    """The model `hf:DIR_OR_NAME` without the adapter that is merged in it, in a new folder: W' − scale · B·A in
    float32, in the dtype of W', which is W but for half a unit in the last place of W', and float32's of the sum.

    Raises `UserError` for an adapter that is no sum, or of another model.
    """
    hub = open_unmerged(source, adapter)
    stored = hub.weights.dtypes
    entries = [Entry(name, stored[name], shape) for name, shape in hub.weights.shapes.items()]
    with atomic_folder(out, "the target") as part:
        files = write_weights(part, entries, lambda name: _whole(hub.weights, name), shard)
        copy_companions(hub.folder, part)
        (part / CONFIG).write_bytes((hub.folder / CONFIG).read_bytes())
    report(f"{source} without {adapter} in {out}: {len(entries)} arrays in {len(files)} file{'s'[: len(files) != 1]}")


def _whole(weights: Any, name: str) -> np.ndarray:
    return weights.read(name, (slice(None),) * len(weights.shape(name)))
