"""Saving, restoring, and what happens when either goes wrong."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store
from axon.errors import UserError


@jax.tree_util.register_dataclass
@dataclass
class State:
    step: Any
    parameters: Any
    optimizer: Any


def mesh(data: int, tensor: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def placed(tree: Any, data: int, tensor: int) -> Any:
    """`tree` on a mesh: matrices sharded over both mesh axes, the rest replicated."""
    on = mesh(data, tensor)
    spec = lambda x: PartitionSpec("data", "tensor") if x.ndim == 2 else PartitionSpec()  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(on, spec(x))), tree)


def fresh_state(step: int = 0, width: int = 16) -> State:
    rng = np.random.default_rng(random.getrandbits(31))
    parameters = {
        "layers": {"up": rng.normal(size=(8, width)).astype(np.float32)},
        "norm": jnp.asarray(rng.normal(size=width), jnp.bfloat16),
    }
    parameters = jax.tree.map(jnp.asarray, parameters)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(jnp.int32(step), parameters, optimizer.init(parameters))


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same_bits(a: Any, b: Any) -> bool:
    flat_a, flat_b = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(flat_a, flat_b, strict=True)
    )


def save_one(folder: Path, state: Any, step: int = 7, extra: dict | None = None) -> None:
    with Store(folder, Checkpoints()) as store:
        store.save(step, state, extra or {})


def test_a_state_comes_back_bit_for_bit_with_its_extra(tmp_path):
    state = placed(fresh_state(7), 4, 2)
    extra = {"seed": 3, "position": [1, {"row": None}], "loss": 0.1}
    save_one(tmp_path, state, extra=extra)
    restored, found = Reader(tmp_path).restore(abstract(state))
    assert same_bits(restored, state)
    assert found == extra
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)


def test_a_state_restores_onto_another_mesh(tmp_path):
    state = fresh_state()
    save_one(tmp_path, placed(state, 8, 1))
    target = placed(state, 2, 4)
    restored, _ = Reader(tmp_path).restore(abstract(target))
    assert same_bits(restored, state)
    assert restored.parameters["layers"]["up"].sharding == target.parameters["layers"]["up"].sharding


def test_only_the_latest_few_are_kept(tmp_path):
    state = fresh_state()
    with Store(tmp_path, Checkpoints(keep=2)) as store:
        for step in (1, 4, 9):
            store.save(step, state, {"step": step})
            assert store.started() == step
        store.wait()
        assert store.steps() == [4, 9]
        assert store.latest() == 9
    assert Reader(tmp_path).restore(abstract(state), step=4)[1] == {"step": 4}


def test_those_of_every_so_many_steps_and_the_best_are_kept_besides_the_latest(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 2.0, 4: 9.0, 5: 9.0, 6: 9.0, 7: 1.5, 8: 9.0}
    for steps in (range(1, 5), range(5, 9)):  # the run is stopped in between
        with Store(tmp_path, Checkpoints(every=1, keep=1, keep_every=4, keep_best=2)) as store:
            store.losses.update({step: losses[step] for step in range(1, steps[0])})
            for step in steps:
                store.save(step, {"w": jnp.ones(3)}, {})
                store.wait()
                store.losses[step] = losses[step]
    assert Reader(tmp_path).steps() == [2, 4, 7, 8]


def test_a_step_interval_to_keep_at_which_nothing_is_saved_is_refused():
    with pytest.raises(UserError, match=r"Checkpoints.keep_every is 300; must be a multiple of Checkpoints.every, 200"):
        Checkpoints(keep_every=300)


@pytest.mark.parametrize("step", [5, 3])
def test_saving_a_step_that_is_not_new_is_refused(tmp_path, step):
    state = fresh_state()
    with Store(tmp_path, Checkpoints()) as store:
        store.save(5, state, {})
        with pytest.raises(CheckpointError, match="step 5 is saved already"):
            store.save(step, state, {})
    with Store(tmp_path, Checkpoints()) as store, pytest.raises(CheckpointError, match="step 5 is saved already"):
        store.save(step, state, {})


def test_a_save_is_not_disturbed_by_donating_the_state(tmp_path, rng):
    value = rng.normal(size=(1024, 1024)).astype(np.float32)
    state = {"parameters": {f"w{i}": jnp.asarray(value) + i for i in range(8)}}
    expected = {name: np.array(w) for name, w in state["parameters"].items()}
    target = abstract(state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    with Store(tmp_path, Checkpoints()) as store:
        store.save(1, state, {})
        jax.block_until_ready(overwrite(state))
    restored, _ = Reader(tmp_path).restore(target)
    assert same_bits(restored["parameters"], expected)


def test_a_save_that_is_not_asynchronous_is_whole_when_it_returns(tmp_path):
    store = Store(tmp_path, Checkpoints(asynchronous=False))
    store.save(2, fresh_state(), {})
    assert Reader(tmp_path).latest() == 2
    store.close()


def test_saves_leave_no_thread_and_no_open_file_behind(tmp_path):
    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with Store(tmp_path, Checkpoints()) as store:
        found = {}
        for step in range(1, 11):
            store.save(step, fresh_state(), {})
            store.wait()
            found[step] = held()
    assert found[10][0] <= found[2][0] + 2  # workers of pools, which are few
    assert found[10][1] <= found[2][1] + 2


def test_keys_and_scalars_of_any_kind_come_back(tmp_path):
    state = {
        "key": jax.random.split(jax.random.key(random.randrange(2**31)), 3),
        "legacy": jax.random.PRNGKey(1),
        "other": jax.random.key(5, impl="rbg"),
        "int64": np.int64(2**40),
        "float": np.float64(0.1),
        "python": 3,
        "flag": np.asarray(True),
    }
    save_one(tmp_path, state)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), getattr(x, "dtype", np.int64)), state)
    target |= {name: abstract(state[name]) for name in ("key", "legacy")}
    restored, _ = Reader(tmp_path).restore(target)
    for name in ("key", "other"):
        assert jax.random.key_impl(restored[name]) == jax.random.key_impl(state[name])
        assert same_bits(jax.random.key_data(restored[name]), jax.random.key_data(state[name]))
    assert isinstance(restored["legacy"], jax.Array)
    for name in ("int64", "float", "python", "flag"):
        assert isinstance(restored[name], np.ndarray)
        assert restored[name] == state[name]


def test_what_is_not_an_array_is_refused_before_anything_is_written(tmp_path):
    with Store(tmp_path, Checkpoints()) as store:
        with pytest.raises(UserError, match=r"parameters/name: cannot save a str"):
            store.save(1, {"parameters": {"name": "llama", "w": jnp.ones(3)}}, {})
        with pytest.raises(TypeError):
            store.save(1, {"w": jnp.ones(3)}, {"bad": object()})
        store.save(1, {"w": jnp.ones(3)}, {})
    assert Reader(tmp_path).latest() == 1


def test_parameters_alone_can_be_restored(tmp_path):
    state = placed(fresh_state(), 4, 2)
    save_one(tmp_path, state)
    # The optimizer's arrays may even be of a kind that this reader could not name.
    assert same_bits(
        Reader(tmp_path).restore_parts({"parameters": abstract(state.parameters)})["parameters"], state.parameters
    )


def test_every_difference_is_listed_in_one_error(tmp_path):
    save_one(tmp_path, fresh_state())
    other = fresh_state(width=24)
    other.parameters["layers"]["gate"] = other.parameters["layers"].pop("up")
    other.step = jnp.float32(0)
    with pytest.raises(CheckpointError) as error:
        Reader(tmp_path).restore(abstract(other))
    text = str(error.value)
    assert str(tmp_path / "7") in text
    for line in (
        "parameters/layers/gate: missing from the checkpoint",
        "parameters/layers/up: only in the checkpoint",
        "parameters/norm: shape (16,) in the checkpoint, (24,) here",
        "optimizer/1/0/mu/norm: shape (16,) in the checkpoint, (24,) here",
        "step: dtype int32 in the checkpoint, float32 here",
    ):
        assert line in text
    with pytest.raises(CheckpointError, match="parameters/layers/gate: missing") as error:
        Reader(tmp_path).restore_parts({"parameters": abstract(other.parameters)})
    assert "optimizer" not in str(error.value).splitlines()[1:-1]


def test_a_long_list_of_differences_is_cut(tmp_path):
    save_one(tmp_path, {f"a{i}": jnp.ones(2) for i in range(50)})
    with pytest.raises(CheckpointError, match="… and 30 more"):
        Reader(tmp_path).restore({f"a{i}": jax.ShapeDtypeStruct((3,), jnp.float32) for i in range(50)})


def test_a_folder_without_checkpoints_says_so_and_is_left_alone(tmp_path):
    reader = Reader(tmp_path / "nowhere")
    assert reader.latest() is None
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere"):
        reader.restore({})
    assert not (tmp_path / "nowhere").exists()


def test_a_step_that_is_not_there_says_which_are(tmp_path):
    save_one(tmp_path, fresh_state())
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 8 .* there are \[7\]"):
        Reader(tmp_path).restore({}, step=8)


@pytest.mark.few(part=("_CHECKPOINT_METADATA", "state/d"))
@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone"])
@pytest.mark.parametrize("part", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "state/d"])
def test_a_damaged_checkpoint_is_an_error_that_names_it_and_all_that_is_said(tmp_path, part, damage, capfd, caplog):
    state = placed(fresh_state(), 4, 2)
    with Store(tmp_path, Checkpoints()) as store:
        store.save(3, state, {"a": 1})
        store.save(7, state, {"a": 2})
    target = tmp_path / "7" / part
    for file in [target] if target.is_file() else target.iterdir():
        size = file.stat().st_size
        file.write_bytes(file.read_bytes()[: size // 2] if damage == "truncated" else random.randbytes(size))
        if damage == "gone":
            file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        Reader(tmp_path).restore(abstract(state))
    assert str(tmp_path / "7") in str(error.value)
    assert "continue from step 3" in str(error.value)
    assert not caplog.records
    assert capfd.readouterr().err == ""
    assert same_bits(Reader(tmp_path).restore(abstract(state), step=3)[0], state)


def test_a_path_that_cannot_hold_checkpoints_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        Store(tmp_path / "file", Checkpoints())


@pytest.mark.parametrize("field", ["every", "keep", "keep_every", "keep_hours", "keep_best"])
def test_intervals_below_one_are_refused(field):
    with pytest.raises(UserError, match=f"Checkpoints.{field} is 0"):
        Checkpoints(**{field: 0})


SAVER = """
import sys
import jax.numpy as jnp
from axon.checkpoint import Checkpoints, Store
with Store(sys.argv[1], Checkpoints(keep=2)) as store:
    for step in range((store.latest() or 0) + 1, 1000):
        state = {"parameters": {str(i): jnp.full((512, 1024), float(step * 10 + i)) for i in range(8)}}
        store.save(step, state, {"step": step})
        print(step, flush=True)
"""


def killed_in_mid_save(folder: Path) -> None:
    """Starts a saver, and kills it with SIGKILL while it is writing a checkpoint, after a random number of saves."""
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert saver.stdout is not None
    for _ in range(random.randint(2, 4)):
        assert saver.stdout.readline()
    deadline = time.monotonic() + 60
    is_caught = False
    while not is_caught:
        saver.send_signal(signal.SIGCONT)
        while not list(folder.glob("*tmp*")):
            assert time.monotonic() < deadline
        time.sleep(random.random() * 0.02)
        saver.send_signal(signal.SIGSTOP)
        os.waitpid(saver.pid, os.WUNTRACED)
        is_caught = bool(list(folder.glob("*tmp*")))
    saver.send_signal(signal.SIGKILL)
    assert saver.wait() == -signal.SIGKILL
    saver.stdout.close()


@pytest.mark.few(times=(1,))
@pytest.mark.parametrize("times", [1, 3])
def test_after_kill_9_in_mid_save_the_last_whole_step_is_there(times, tmp_path):
    for _ in range(times):
        killed_in_mid_save(tmp_path)
        step = Reader(tmp_path).latest()
        assert step is not None
        target = {"parameters": {str(i): jax.ShapeDtypeStruct((512, 1024), jnp.float32) for i in range(8)}}
        restored, extra = Reader(tmp_path).restore(target)
        assert extra == {"step": step}
        for i in range(8):
            np.testing.assert_array_equal(restored["parameters"][str(i)], step * 10 + i)
        with Store(tmp_path, Checkpoints()) as store:
            assert store.latest() == step
            deadline = time.monotonic() + 30  # cleared behind the run's first steps, at the latest by its first save
            while list(tmp_path.glob("*tmp*")):
                assert time.monotonic() < deadline


LIMITED = """
import resource, signal, sys
import jax.numpy as jnp
from axon.checkpoint import CheckpointError, Checkpoints, Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store(sys.argv[1], Checkpoints())
store.save(1, {"w": jnp.ones(8)}, {})
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
import numpy as np
store.save(2, {"w": np.random.default_rng().normal(size=(1024, 1024))}, {})
try:
    store.close()
except CheckpointError as error:
    print(error)
"""


def test_a_save_that_cannot_be_written_is_an_error_at_the_next_wait(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert f"checkpoint 2 could not be written in {tmp_path}" in done.stdout, done.stderr
    assert "The last complete one is of step 1" in done.stdout
    assert done.stderr == ""
    assert Reader(tmp_path).latest() == 1


def test_a_first_save_that_cannot_be_written_says_that_there_is_none_before_it(tmp_path, monkeypatch):
    with Store(tmp_path, Checkpoints()) as store:

        def fail():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(store._orbax, "wait", fail)
            with pytest.raises(CheckpointError, match=r"No space left on device\nThere is none before it"):
                store.wait()


def test_what_others_log_is_still_heard_while_a_store_is_open(tmp_path, caplog):
    with Store(tmp_path, Checkpoints()) as store:
        store.save(1, {"w": jnp.ones(3)}, {})
        store.wait()
        store.extra()
        logging.getLogger("absl").warning("grain has something to say")
    assert [record.getMessage() for record in caplog.records] == ["grain has something to say"]
    assert not logging.getLogger("absl").filters
