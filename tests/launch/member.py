"""What each of some real processes, mostly two of two devices, finds out. Run with the folder to write it to,
`<process>.json`, the number of processes, and the names of what each shall tell.

The functions `tell_…` give what the tests of this folder look at; one launch serves all that run by default.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYOUTS = [
    {"mesh": {"data": 4}},
    {"mesh": {"data": -1}},
    {"mesh": {"tensor": 4}},
    {"mesh": {"data": 2, "tensor": 2}},
    {"mesh": {"context": 4}},
    {"mesh": {"data": 2, "context": 2}},
    {"mesh": {"context": 2, "tensor": 2}},
    {"mesh": {"replica": 2, "data": 2}},
    {"mesh": {"tensor": 2, "data": 2}, "rows": {"batch": ("data", "tensor")}, "order": ("tensor", "data")},
]
SEQUENCES, SEQ = 8, 12


def corpus():
    from axon.data import Data, Synthetic

    return Data(seq=SEQ, batch=SEQUENCES, sources=(Synthetic(50, 200, 40),), held_out=0.3).prepare(str)


def tell_agreement(me: int) -> dict:
    """What both know alike: largest values, whose turn it is, and the step at which to stop."""
    from axon.launch.agree import AgreedStop, largest, process_0_first
    from axon.launch.signals import Interrupts

    told = {"largest": [int(largest(value)) for value in (7 * me, 5 - me, 3)], "inside": []}
    for _ in range(2):
        with process_0_first("a test"):
            began = time.time()
            time.sleep(0.3)
            told["inside"].append([began, time.time()])
    for behind in (0, 1):
        with Interrupts() as interrupts:
            stop = AgreedStop(interrupts)
            for step in range(1, 100):
                if me == 1 and step == 5:
                    signal.raise_signal(signal.SIGTERM)
                if stop.ask(behind):
                    break
            told[f"stopped {behind}"] = [step, stop.requested]
    return told


def tell_alike(me: int) -> dict:
    """What each is told of accounts that are the same, and of some that differ."""
    from axon.launch.agree import check_alike
    from axon.launch.key_value import ProcessesError

    differing = {"a": "1", "b": f"{me}"} | ({"c": "@x.C()", "c.d": "2"} if me else {})
    told, accounts = {}, {"same": {"a": "1"}, "differing": differing}
    for name, account in accounts.items():
        try:
            check_alike(name, lambda account=account: account)
            told[name] = ""
        except ProcessesError as error:
            told[name] = str(error)
    return told


def tell_rewards(me: int) -> list:
    """What each has as the scores of answers, by rewards that fail in one process and differ in both, and whether keys
    are left."""
    from jax._src import distributed

    from axon.tune.judge import Judge
    from axon.tune.rewards import Sampled

    def fails_in(process: int) -> Callable[[Sampled], float]:
        def reward(sampled: Sampled) -> float:
            if me == process and sampled.ids[0] % 2:
                raise ValueError
            return 0.1 * sampled.ids[0] + me

        return reward

    said: list[str] = []
    judge = Judge({"first": fails_in(0), "second": fails_in(1)}, {"second": 2.0}, 5.0, said.append)
    told = []
    for begin in range(3):
        scores = judge([Sampled("", "", (begin + number,)) for number in range(4)])
        told.append([scores.each["first"].tolist(), scores.each["second"].tolist(), scores.total.tolist()])
    client = distributed.global_state.client
    return [told, len(said), len(client.key_value_dir_get("axon/rewards"))]


def tell_feed(me: int) -> list:
    """By layout: which sequences this process reads, and whether its devices hold what they would in one process."""
    import numpy as np

    from axon.layout import Layout, Placement
    from axon.train import feed
    from axon.train.evaluate import BATCH

    data, told = corpus(), []
    whole = {"train": data.train(3, 11), "held_out": data.held_out()}
    whole = {split: [next(batches) for _ in range(2)] for split, batches in whole.items()}
    for layout in LAYOUTS:
        placement = Placement.of(Layout(**layout))
        sharding, mine = placement.sharding(BATCH), feed.host_sequences(placement.sharding(BATCH[:1]), SEQUENCES)
        right = True
        for split, batches in {"train": data.train(3, 11, mine), "held_out": data.held_out(sequences=mine)}.items():
            for expected, read in zip(whole[split], batches, strict=False):
                assert len(read["tokens"]) == len(mine)
                for name, array in feed.place(dict.fromkeys(read, sharding), read, mine, SEQUENCES).items():
                    assert array.shape == (SEQUENCES, SEQ)
                    assert array.sharding == sharding
                    for shard in array.addressable_shards:
                        right &= np.array_equal(shard.data, expected[name][shard.index])
        told.append([mine.tolist(), right])
    return told


def trained(layout: dict, layers: int):
    """A program on the first four devices, and loss, gradient norm and tokens of three steps of it."""
    import jax

    from axon.layout import Layout
    from axon.train import feed
    from axon.train.evaluate import BATCH
    from axon.train.optimizers import AdamW, Constant
    from axon.train.step import Program
    from models.llama import Llama

    model = Llama(vocab=64, embed=16, layers=layers, heads=2, kv_heads=2, mlp=24)
    optimizer, devices = AdamW(Constant(1e-2)), jax.devices()[:4]
    program = Program(model, Layout(**layout), optimizer, batch=SEQUENCES, seq=SEQ, devices=devices)
    mine = feed.host_sequences(program.placement.sharding(BATCH[:1]), SEQUENCES)
    state, told = program.init(), []
    for _, batch in zip(range(3), corpus().train(3, 11, mine), strict=False):
        state, metrics = program.step(state, program.place(batch))
        told.append([float(metrics[name]) for name in ("loss", "grad_norm", "tokens")])
    return program, told


def tell_training(me: int) -> list:
    return trained({"mesh": {"data": 2, "tensor": 2}, "zero": 3}, layers=1)[1]


def tell_pipeline(me: int) -> dict:
    """Of a pipeline of two stages: its numbers, and which stages this process has."""
    layout = {"mesh": {"pipe": 2, "data": 2}, "microbatches": 2, "zero": 1}
    program, numbers = trained(layout, layers=2)
    mesh = program.placement.mesh.devices  # pipe data
    return {"numbers": numbers, "stages": [s for s, row in enumerate(mesh) if row[0].process_index == me]}


def tell_split(me: int) -> list:
    """The numbers of two stages of two devices each, with two chunks and split backwards."""
    from axon.parallel.pipeline import Interleaved

    schedule = Interleaved(2, split=True)
    return trained({"mesh": {"pipe": 2, "tensor": 2}, "microbatches": 4, "schedule": schedule}, layers=4)[1]


def tell_damage(me: int, folder: Path) -> dict:
    """Of two checkpoints, in the later one of which a byte of this process's own arrays is flipped by process 1."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import NamedSharding, PartitionSpec

    from axon.checkpoint import Checkpoints, Reader, Store

    split = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
    state = {"w": jax.device_put(jnp.arange(4096.0) ** 0.5, split)}
    with Store(folder, Checkpoints()) as store:
        for step in (1, 2):
            store.save(step, state, {"step": step})
    told = {"intact": [Reader(folder).damage(step) for step in (1, 2)]}
    told["parts"] = sorted(path.name for path in (folder / "2/state/checksums").iterdir())
    if me == 1:
        file = max((folder / "2/state/ocdbt.process_1/d").iterdir(), key=lambda path: path.stat().st_size)
        content = file.read_bytes()
        file.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    sync_global_devices("flipped")
    with Store(folder, Checkpoints()) as store:
        store.newest(store.extra)
        return told | {"notices": store.notices, "steps": store.steps()}


def tell_tiers(me: int, folder: Path) -> dict:
    """Of checkpoints in two folders: those that both see, and whether a local one of each process's own is refused."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from axon.checkpoint import CheckpointError, Checkpoints, open_store

    sharding = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
    state = {"w": jax.device_put(jnp.arange(4096.0) ** 0.5, sharding)}
    abstract = {"w": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=sharding)}
    shared = Checkpoints(local_folder=str(folder / "local"), local_every=1)
    with open_store(folder / "durable", shared, "run") as store:
        store.save(1, state, {"step": 1})
        store.save(2, state, {"step": 2}, durable=False)
    with open_store(folder / "durable", shared, "run") as store:
        restored, extra = store.newest(lambda: store.of_step().restore(abstract))
    told = {"steps": store.steps(), "extra": extra, "same": bool(jnp.all(restored["w"] == state["w"]))}
    (folder / "file").touch()
    for name, local in (("own", folder / f"own-{me}"), ("unwritable", folder / "file")):
        try:
            open_store(folder / "durable", Checkpoints(local_folder=str(local), local_every=1), "run")
        except CheckpointError as error:
            told[name] = str(error)
    return told


TELL: dict[str, Callable[[int, Path], Any]] = {
    "alike": lambda me, folder: tell_alike(me),
    "agreement": lambda me, folder: tell_agreement(me),
    "rewards": lambda me, folder: tell_rewards(me),
    "feed": lambda me, folder: tell_feed(me),
    "training": lambda me, folder: tell_training(me),
    "pipeline": lambda me, folder: tell_pipeline(me),
    "split": lambda me, folder: tell_split(me),
    "damage": lambda me, folder: tell_damage(me, folder / "checkpoints"),
    "tiers": lambda me, folder: tell_tiers(me, folder / "tiers"),
}


def main(folder: Path, names: list[str]) -> None:
    from axon.launch.cluster import Process

    Process.found(os.environ).join()
    import jax

    me = jax.process_index()
    (folder / f"{me}.json").write_text(json.dumps({name: TELL[name](me, folder) for name in names}))


if __name__ == "__main__":
    if "AXON_PROCESS" not in os.environ:
        from axon.launch.local import launch

        sys.exit(launch(int(sys.argv[2])))
    main(Path(sys.argv[1]), sys.argv[3:])
