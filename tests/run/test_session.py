"""Doing a run: all that a run directory holds afterwards, stopping, continuing, and what must not be continued."""

import errno
import io
import json
import math
import os
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from remembering import Remembering

from axon.checkpoint import Checkpoints, Reader
from axon.config import load
from axon.data import Folder, TokenizerFile
from axon.errors import UserError
from axon.launch.signals import Interrupted
from axon.layout import Execution, Layout
from axon.nn import Param, Routing
from axon.observe.metrics import held_out_losses, read_metrics
from axon.observe.trackers import TensorBoard
from axon.parallel.pipeline import Interleaved, TwoBW
from axon.run import Evaluation, Sample, program, run
from axon.run.folder import RunFolder
from axon.run.inspect import generate_text
from axon.serve.request import Sampling
from axon.train.loop import Diverged
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Constant
from models.gpt2 import GPT2
from models.mixtral import Mixtral

KEYS = {"step", "loss", "tokens", "tokens_per_second", "step_seconds", "mfu", "grad_norm", "learning_rate"}


def records(folder, *names):
    """Of each training step: step and the named numbers."""
    return [
        [record[name] for name in ("step", *names)]
        for record in read_metrics(folder / "metrics.jsonl")
        if "loss" in record
    ]


def evaluated(folder):
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "eval_loss" in record]


def parameters(ran):
    parts = {"parameters": program(ran.train).abstract_state().parameters}
    return jax.tree.leaves(Reader(ran.folder / "checkpoints").restore_parts(parts))


def test_every_step_has_a_record_with_every_number(trained):
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, trained.train.steps + 1))
    assert all(line.keys() == KEYS for line in steps)
    assert all(math.isfinite(line[key]) for line in steps for key in KEYS)
    data = trained.train.data
    assert [line["tokens"] for line in steps] == [line["step"] * data.batch * data.seq for line in steps]


def test_the_loss_falls(trained):
    losses = [loss for _, loss in records(trained.folder, "loss")]
    assert losses[-1] < 0.75 * losses[0]


def test_held_out_text_is_evaluated_when_due_and_at_the_end(trained):
    assert evaluated(trained.folder) == [10, 12]
    last = read_metrics(trained.folder / "metrics.jsonl")[-1]
    assert last.keys() == {"step", "eval_loss", "eval_bits_per_byte"}
    said = f"step 12: validation loss {last['eval_loss']:.4f} nats per token, {last['eval_bits_per_byte']:.4f} bits"
    assert any(line.startswith(said) for line in trained.lines)


def test_the_folder_holds_all_that_describes_the_run(trained):
    folder = trained.folder
    assert load(folder / "config.gin").tree == trained.train
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert TokenizerFile(str(folder / "tokenizer.json")).load().vocab <= trained.train.model.vocab
    assert Reader(folder / "checkpoints").steps() == [10, 12]
    record = json.loads((folder / "run.json").read_text())
    assert record["versions"]["jax"] == jax.__version__
    assert {"commit", "dirty"} <= record["git"].keys()
    assert record["hardware"]["devices"] == 1
    assert record["command"]
    assert record["data"]["digests"]


def test_a_sample_that_the_model_has_no_positions_for_is_refused_before_a_step_is_trained(tiny, do, tmp_path):
    short = GPT2(vocab=320, embed=32, layers=1, heads=4, mlp=48, positions=32)
    sample = Sample("alpha beta", Sampling(tokens=32))
    with pytest.raises(UserError, match=r"tokens and 32 more need \d+ positions, and this model has 32"):
        do(replace(tiny, model=short, sample=sample), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_end_says_where_everything_is_and_continues_the_sample(trained):
    said = "\n".join(trained.lines)
    assert "alpha beta" in said
    assert str(trained.folder / "loss.png") in said
    assert str(trained.folder / "checkpoints/12") in said


def test_a_second_time_there_is_nothing_left_to_train(trained, do, copied):
    before = (copied / "metrics.jsonl").read_text()
    again = do(trained.train, copied)
    assert "resumed from step 12" in again.lines
    assert any("nothing left to train" in line for line in again.lines)
    assert (copied / "metrics.jsonl").read_text() == before


def test_a_run_that_was_stopped_and_continued_is_bit_identical(tiny, trained, do, tmp_path, rng):
    stop = int(rng.integers(1, 12))
    do(tiny, tmp_path, steps=stop)
    assert [step for step, _ in records(tmp_path, "loss")] == list(range(1, stop + 1))
    continued = do(tiny, tmp_path)
    assert f"resumed from step {stop}" in continued.lines
    numbers = ("loss", "grad_norm", "learning_rate", "tokens")
    assert records(tmp_path, *numbers) == records(trained.folder, *numbers)
    for one, other in zip(parameters(trained), parameters(continued), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_feed_goes_on_with_what_the_checkpoint_keeps_for_it(tiny, do, tmp_path):
    tiny = replace(tiny, data=Remembering(tiny.data), steps=6, checkpoints=Checkpoints(every=3), evaluation=None)
    whole = do(tiny, tmp_path / "whole")
    ran = do(tiny, tmp_path / "run", steps=4)
    shutil.rmtree(ran.folder / "checkpoints" / "4")  # as if killed before the fourth step was saved
    do(tiny, tmp_path / "run")
    assert records(ran.folder, "loss", "grad_norm") == records(whole.folder, "loss", "grad_norm")


@pytest.mark.full
@pytest.mark.draws(1)
def test_what_was_written_after_the_last_checkpoint_is_cut_back_and_a_torn_line_tolerated(trained, do, copied):
    shutil.rmtree(copied / "checkpoints/12")
    with (copied / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 13, "loss": 1.5')
    do(trained.train, copied)
    assert records(copied, "loss") == records(trained.folder, "loss")


def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before_and_says_so(trained, do, copied):
    with (copied / "checkpoints/12/state/manifest.ocdbt").open("r+b") as file:
        file.write(b"\xff")
    again = do(trained.train, copied)
    (said,) = (line for line in again.lines if line.startswith("checkpoint 12 is damaged"))
    assert "state/manifest.ocdbt: bytes 0 to" in said
    assert said.endswith(f"kept as {copied / 'checkpoints/12.damaged'}; continuing from step 10")
    assert "resumed from step 10" in again.lines
    assert records(copied, "loss") == records(trained.folder, "loss")
    assert Reader(copied / "checkpoints").steps() == [10, 12]


@pytest.mark.full
def test_the_best_by_its_evaluation_is_kept_besides_the_latest(tiny, do, tmp_path):
    best = replace(tiny, checkpoints=Checkpoints(every=5, keep=1, keep_best=1))
    do(best, tmp_path, steps=10)
    do(best, tmp_path)  # what the first call evaluated is known to the second
    losses = held_out_losses(tmp_path / "metrics.jsonl")
    assert losses.keys() == {10, 12}
    assert {*Reader(tmp_path / "checkpoints").steps()} == {12, min(losses, key=losses.__getitem__)}


@pytest.mark.full
def test_an_evaluation_that_a_kill_prevented_is_made_up_for(trained, do, copied):
    shutil.rmtree(copied / "checkpoints/12")
    kept = [record for record in read_metrics(copied / "metrics.jsonl") if "loss" in record and record["step"] <= 10]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    do(trained.train, copied)
    assert evaluated(copied) == [10, 12]


@pytest.mark.smoke
@pytest.mark.full
def test_continued_on_another_layout_the_losses_match(tiny, trained, do, tmp_path, eight):
    do(tiny, tmp_path, steps=4)
    other = do(replace(tiny, layout=eight), tmp_path, devices=8, steps=10)
    changed = "changed since the last start: devices 1 → 8, mesh {'data': 1} → {'data': 4, 'tensor': 2}"
    assert f"{changed}, layout.zero 0 → 3" in other.lines
    np.testing.assert_allclose(records(tmp_path, "loss"), records(trained.folder, "loss")[:10], rtol=1e-5)
    np.testing.assert_allclose(records(tmp_path, "grad_norm"), records(trained.folder, "grad_norm")[:10], rtol=1e-5)


@pytest.mark.slow
def test_continued_on_stages_and_on_auto_axes_the_losses_match(tiny, do, tmp_path):
    deep = replace(tiny, model=replace(tiny.model, layers=4))
    whole = do(deep, tmp_path / "whole", steps=10)
    stages = Layout({"pipe": 2, "data": 2}, schedule=Interleaved(2), microbatches=4, zero=1)
    layouts = ((Layout(), 1, 3), (stages, 4, 6), (Layout({"data": 2, "tensor": 2}, zero=3, auto=True), 4, 10))
    for layout, devices, steps in layouts:
        do(replace(deep, layout=layout), tmp_path / "changing", devices=devices, steps=steps)
    found, expected = (records(folder, "loss", "grad_norm") for folder in (tmp_path / "changing", whole.folder))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_pipeline_without_a_flush_goes_on_with_the_batch_in_flight_and_says_where_it_cannot(tiny, do, few, tmp_path):
    stages = Layout({"pipe": 2}, microbatches=4, schedule=TwoBW())
    endless = replace(tiny, model=replace(tiny.model, layers=2), layout=stages)
    whole = do(endless, tmp_path / "whole", devices=2)
    assert records(whole.folder, "loss", "tokens", "grad_norm", "learning_rate")[0] == [1, 0, 0, 0, 0]
    assert records(whole.folder, "loss")[-1][1] < records(whole.folder, "loss")[1][1]
    do(endless, tmp_path / "stopped", devices=2, steps=5)
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    continued = do(endless, tmp_path / "stopped", devices=2)
    assert not any("in flight is lost" in line for line in continued.lines)
    assert records(continued.folder, "loss", "grad_norm") == records(whole.folder, "loss", "grad_norm")
    with few(2):
        jax.tree.map(np.testing.assert_array_equal, parameters(whole), parameters(continued))
    plain = do(replace(endless, layout=Layout({"data": 2})), tmp_path / "other", devices=2)
    assert any(line.startswith("the batch in flight is lost") for line in plain.lines)
    assert records(plain.folder, "loss")[-1][1] > 0


@pytest.mark.full
def test_a_run_goes_on_with_its_optimizer_state_in_files_and_without(tiny, trained, do, tmp_path, eight):
    disk = {"optimizer": str(tmp_path)}
    begun = do(replace(tiny, execution=Execution(disk=disk)), tmp_path / "run", steps=3)
    assert f"disk: optimizer in files in {tmp_path}, read and written one layer at a time" in begun.lines
    do(tiny, tmp_path / "run", steps=6)
    do(replace(tiny, layout=eight, execution=Execution(disk=disk)), tmp_path / "run", devices=8)
    found, expected = (records(folder, "loss", "grad_norm") for folder in (tmp_path / "run", trained.folder))
    np.testing.assert_allclose(found[:10], expected[:10], rtol=1e-5)
    assert evaluated(tmp_path / "run") == [3, 6, 10, 12]


def test_a_disk_that_is_not_there_is_said_before_any_work(tiny, do, tmp_path):
    with pytest.raises(UserError, match="there is no folder /nowhere"):
        do(replace(tiny, execution=Execution(disk={"optimizer": "/nowhere"})), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_run_continues_where_a_step_is_computed_in_another_way(tiny, trained, do, tmp_path):
    do(tiny, tmp_path, steps=4)
    execution = Execution(remat="full", unroll=True, kernels={"attention": "xla"})
    other = do(replace(tiny, execution=execution), tmp_path, steps=8)
    assert "resumed from step 4" in other.lines
    execution = (
        "execution.remat 'none' → 'full', execution.unroll None → True, execution.kernels {} → {'attention': 'xla'}"
    )
    assert f"changed since the last start: {execution}" in other.lines
    np.testing.assert_allclose(records(tmp_path, "loss"), records(trained.folder, "loss")[:8], rtol=1e-5)
    np.testing.assert_allclose(records(tmp_path, "grad_norm"), records(trained.folder, "grad_norm")[:8], rtol=1e-5)


@pytest.mark.full
def test_a_run_of_experts_continues_with_another_dispatcher_margin_tier_and_compiler(tiny, do, tmp_path):
    shape = {"vocab": 320, "embed": 32, "layers": 1, "heads": 4, "kv_heads": 4, "mlp": 32}
    experts = replace(tiny, model=Mixtral(**shape, routing=Routing(4, 2)), layout=Layout({"expert": 2}), steps=6)
    execution = Execution(
        dispatcher="dense",
        capacity_factor=2.0,
        host=("optimizer",),
        compiler_options={"xla_cpu_enable_fast_math": False},
    )
    do(experts, tmp_path / "plain", devices=2)
    do(experts, tmp_path / "run", devices=2, steps=3)
    other = do(replace(experts, execution=execution), tmp_path / "run", devices=2)
    said = next(line for line in other.lines if line.startswith("changed since the last start: "))
    for field in ("dispatcher", "capacity_factor", "host", "compiler_options"):
        assert f"execution.{field} " in said
    np.testing.assert_allclose(records(tmp_path / "run", "loss"), records(tmp_path / "plain", "loss"), rtol=1e-5)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_mesh_of_fewer_devices_than_there_are_is_taken_and_said(tiny, do, tmp_path):
    ran = do(replace(tiny, layout=Layout({"data": 2}), evaluation=None), tmp_path, devices=8, steps=1)
    assert "Layout.mesh is of 2 of the 8 devices there are: the first are used" in ran.lines


@pytest.mark.full
def test_layout_steps_saving_evaluation_and_trackers_may_change(trained, do, copied):
    changed = replace(
        trained.train,
        steps=14,
        layout=Layout(microbatches=2),
        checkpoints=Checkpoints(every=7, keep=1, asynchronous=False),
        evaluation=Evaluation(every=4, batches=1),
        trackers=(TensorBoard(),),
        data=replace(trained.train.data, threads=0),
    )
    do(changed, copied)
    assert records(copied)[-1] == [14]
    assert Reader(copied / "checkpoints").steps() == [14]
    assert list((copied / "tensorboard").glob("events.*"))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda t: replace(t, model=replace(t.model, mlp=128)), "model.mlp: 64 → 128"),
        (lambda t: replace(t, optimizer=replace(t.optimizer, b2=0.9)), "optimizer.b2: 0.95 → 0.9"),
        (lambda t: replace(t, data=replace(t.data, batch=16)), "data.batch: 8 → 16"),
        (lambda t: replace(t, seed=3), "seed: 0 → 3"),
        (lambda t: replace(t, objective=NextToken(1e-4)), "objective.z_loss: 0.0 → 0.0001"),
    ],
)
def test_another_model_optimizer_data_or_seed_is_refused(trained, do, change, difference):
    before = (trained.folder / "config.gin").read_text()
    with pytest.raises(UserError, match="has another run") as refused:
        do(change(trained.train), trained.folder)
    assert difference in str(refused.value)
    assert "What may change: data.sources" in str(refused.value)
    assert (trained.folder / "config.gin").read_text() == before


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_run_begun_from_python_is_the_one_that_its_folder_records(tiny, do, tmp_path):
    # A list, a whole number and a path are a tuple, a float and a string when they come back from config.gin.
    folder = Path(tiny.data.sources[0].path)
    data = replace(tiny.data, sources=[Folder(folder)], weights=[1], store=str(tmp_path / "store"))  # pyright: ignore
    loose = replace(tiny, data=data, objective=NextToken(0))
    do(loose, tmp_path / "run", steps=2)
    ran = do(replace(loose, steps=14), tmp_path / "run", steps=3)
    assert "resumed from step 2" in ran.lines
    with pytest.raises(UserError, match=r"objective\.z_loss: 0\.0 → 1\.0"):
        do(replace(loose, objective=NextToken(1)), tmp_path / "run", steps=4)


def test_a_second_run_in_a_folder_is_refused_while_the_first_goes_on(tiny, trained, do, copied):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.name != "lock"}
    with RunFolder(copied).locked(), pytest.raises(UserError, match=rf"locked by process {os.getpid()} on .*: wait"):
        do(trained.train, copied)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert "nothing left to train" in " ".join(do(trained.train, copied).lines)


@pytest.mark.parametrize(
    "name", ["config.gin", "tokenizer.json", "run.json", "metrics.jsonl", "loss.png", "lock", "id"]
)
def test_a_file_of_a_persons_own_with_a_name_of_ours_is_not_written_over(tiny, do, tmp_path, name):
    (tmp_path / name).write_text("[]  # mine\n")
    with pytest.raises(
        UserError, match=rf"{name} is not of a run: this run would overwrite it. Give another --run-dir"
    ):
        do(tiny, tmp_path)
    assert (tmp_path / name).read_text() == "[]  # mine\n"


def test_text_that_moved_is_the_same_text_and_other_text_is_refused(trained, do, copied, tmp_path):
    source = trained.train.data.sources[0]
    text = tmp_path / "text"
    shutil.copytree(source.path, text)
    moved = replace(trained.train, data=replace(trained.train.data, sources=(replace(source, path=str(text)),)))
    do(moved, copied)
    (text / "more.txt").write_text("omega " * 500)
    with pytest.raises(UserError, match="its content has changed"):
        do(moved, copied)


def test_a_run_that_did_not_come_to_its_first_step_may_be_begun_anew(tiny, do, tmp_path):
    RunFolder(tmp_path).write(replace(tiny, seed=7), {})
    do(tiny, tmp_path, steps=1)
    assert load(tmp_path / "config.gin").tree.seed == tiny.seed


def test_a_run_begins_from_the_parameters_of_another(tiny, trained, do, tmp_path):
    still = AdamW(Constant(0.0))
    begun = do(replace(tiny, init_from=str(trained.folder), optimizer=still), tmp_path, steps=1)
    for one, other in zip(parameters(trained), parameters(begun), strict=True):
        np.testing.assert_array_equal(one, other)
    assert records(tmp_path, "loss")[0][1] < records(trained.folder, "loss")[1][1]


@pytest.mark.full
def test_parameters_of_a_run_with_other_tokens_are_refused(tiny, trained, do, tmp_path):
    other = replace(tiny.data, tokenizer=replace(tiny.data.tokenizer, vocab=265))
    with pytest.raises(UserError, match="its tokenizer differs from this run's") as refused:
        do(replace(tiny, data=other, init_from=str(trained.folder)), tmp_path / "run")
    assert f"TokenizerFile.path = {str(trained.folder / 'tokenizer.json')!r}" in str(refused.value)
    assert not (tmp_path / "run").exists()
    same = replace(other, tokenizer=TokenizerFile(str(trained.folder / "tokenizer.json")))
    do(replace(tiny, data=same, init_from=str(trained.folder)), tmp_path / "run", steps=1)  # as the message advises


@pytest.mark.full
def test_a_run_goes_on_when_the_one_it_began_from_is_gone(tiny, trained, do, copied, tmp_path):
    begun = replace(tiny, init_from=str(copied))
    do(begun, tmp_path / "run", steps=1)
    shutil.rmtree(copied)
    assert "resumed from step 1" in do(begun, tmp_path / "run", steps=2).lines
    with pytest.raises(UserError, match="there is no folder"):
        do(begun, tmp_path / "new", steps=1)


def test_a_checkpoint_says_by_itself_what_was_trained(trained, tmp_path):
    (tmp_path / "config.gin").write_text(Reader(trained.folder / "checkpoints").extra()["config"])
    assert load(tmp_path / "config.gin").tree == trained.train


class Matrix(nnx.Module):
    def __init__(self):
        self.up = Param("embed mlp", {"embed": 2, "mlp": 3})


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (
            lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            r"variables that have no named axes: bias, kernel.*axon\.nn\.Param",
        ),
        (lambda: 3, r"Other\.build\(\) \(.*test_session\.py:\d+.*\) gives a int: expected a flax\.nnx\.Module"),
        (Matrix, "NextToken needs an axon.nn.LanguageModel.* returns a Matrix"),
    ],
)
def test_a_model_that_builds_something_else_is_said_so(built, message, tiny, do, tmp_path):
    class Other(type(tiny.model)):
        def build(self):
            return built()

    model = Other(**{field.name: getattr(tiny.model, field.name) for field in fields(tiny.model)})
    with pytest.raises(UserError, match=message):
        do(replace(tiny, model=model), tmp_path)


def test_divergence_stops_with_step_batch_and_parameter_and_spoils_no_checkpoint(tiny, do, tmp_path):
    absurd = replace(tiny, optimizer=AdamW(Constant(1e30)), checkpoints=Checkpoints(every=1))
    with pytest.raises(Diverged) as stopped:
        do(absurd, tmp_path)
    step = records(tmp_path)[-1][0] + 1
    message = str(stopped.value)
    assert message.startswith(f"step {step}: loss ")
    assert f"batch {step - 1} of seed 0" in message
    assert any(path in message for path in program(tiny).parameters)
    reader = Reader(tmp_path / "checkpoints")
    assert reader.latest() == step - 1
    state, extra = reader.restore(program(absurd).abstract_state())
    assert int(state.step) == step - 1
    assert extra["tokens"] == (step - 1) * 8 * 32


def interrupting(number, when):
    """A report that sends this process a signal at the first line that begins with `when`."""
    pending = [number]

    def report(line):
        if line.startswith(when) and pending:
            os.kill(os.getpid(), pending.pop())

    return report


@pytest.mark.parametrize(
    ("number", "when", "least"),
    [
        (signal.SIGINT, "model:", 0),
        (signal.SIGINT, "attention:", 0),
        (signal.SIGTERM, "MFU =", 1),
        (signal.SIGINT, "step 10: validation", 10),
    ],
)
def test_an_interrupt_saves_and_the_run_goes_on_from_there(tiny, trained, do, few, tmp_path, number, when, least):
    begun = replace(tiny, run_dir=str(tmp_path))
    with few(1), pytest.raises(Interrupted) as stopped:
        run(begun, report=interrupting(number, when))
    assert stopped.value.exit_code == 128 + number
    seen = records(tmp_path)[-1][0] if records(tmp_path) else 0
    assert seen >= least
    assert (Reader(tmp_path / "checkpoints").latest() or 0) == seen
    do(tiny, tmp_path)
    assert records(tmp_path, "loss") == records(trained.folder, "loss")


def local_tier(train, folder, every=12):
    """The run with checkpoints of every second step in a local folder, and of every so many in its own."""
    local = {"local_folder": str(folder / "local"), "local_every": 2, "local_keep": 2}
    return replace(train, checkpoints=Checkpoints(every=every, **local), evaluation=None, sample=None)


def killed(train, folder, do, step):
    """The run's folder as it is when the run was killed after `step`, the last that it saved in its local folder."""
    do(local_tier(train, folder), folder / "run", steps=step + 1)
    shutil.rmtree(folder / f"run/checkpoints/{step + 1}")
    return folder / "run"


@pytest.fixture
def at_local_step(tiny, do, tmp_path):
    """The folder of a run whose only checkpoints are those of steps 4 and 6 in its local folder."""
    return killed(tiny, tmp_path, do, 6)


@pytest.mark.full
def test_an_interrupt_before_the_first_step_leaves_what_was_restored_in_the_durable_folder(
    tiny, trained, do, few, at_local_step, tmp_path
):
    begun = replace(local_tier(tiny, tmp_path), run_dir=str(at_local_step))
    with few(1), pytest.raises(Interrupted):
        run(begun, report=interrupting(signal.SIGTERM, "resumed from step 6"))
    shutil.rmtree(tmp_path / "local")  # with its machine
    assert "resumed from step 6" in do(begun, at_local_step).lines
    assert records(at_local_step, "loss") == records(trained.folder, "loss")


@pytest.mark.full
def test_a_run_that_ends_at_a_local_checkpoint_has_it_in_its_own_folder(tiny, do, at_local_step, tmp_path):
    again = do(local_tier(tiny, tmp_path), at_local_step, steps=6)
    assert f"checkpoint: {at_local_step / 'checkpoints/6'}" in again.lines
    assert Reader(at_local_step / "checkpoints").steps() == [6]


def test_a_copy_of_a_run_and_one_begun_anew_do_not_find_its_local_checkpoints(tiny, tmp_path):
    first, copy = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "copy")
    first.write(tiny, {})
    (tmp_path / "link").symlink_to(first.path)
    shutil.copytree(first.path, copy.path)
    begun = first.identity()
    assert begun == RunFolder(tmp_path / "link").identity() == RunFolder(tmp_path / "copy/../run").identity()
    shutil.rmtree(first.path)
    first.write(tiny, {})
    assert len({begun, copy.identity(), first.identity()}) == 3


@pytest.mark.full
def test_a_run_that_has_but_local_checkpoints_begins_another_and_needs_not_what_it_began_from(
    tiny, trained, do, few, copied, tmp_path
):
    begun = replace(tiny, init_from=str(copied))
    folder = killed(begun, tmp_path, do, 4)
    shutil.rmtree(copied)
    with few(1):
        values = Reader(next((tmp_path / "local").glob("*/"))).restore_parts(
            {"parameters": program(begun).abstract_state().parameters}
        )
        assert generate_text(folder, "alpha", Sampling(tokens=1), lambda _: None).startswith("alpha")
    still = replace(tiny, optimizer=AdamW(Constant(0.0)), init_from=str(folder))
    other = do(still, tmp_path / "other", steps=1)
    for one, two in zip(jax.tree.leaves(values), parameters(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert "resumed from step 4" in do(local_tier(begun, tmp_path), folder, steps=5).lines


@pytest.mark.full
@pytest.mark.draws(1)
def test_where_neither_folder_has_a_checkpoint_both_are_named(tiny, do, at_local_step, tmp_path):
    shutil.rmtree(tmp_path / "local")
    with pytest.raises(UserError, match=rf"no checkpoint in {at_local_step}/checkpoints, and none .*{tmp_path}/local'"):
        do(replace(tiny, init_from=str(at_local_step)), tmp_path / "other", steps=1)


@pytest.mark.full
def test_a_profile_is_recorded_and_nothing_else_changes(tiny, trained, do, tmp_path):
    ran = do(replace(tiny, checkpoints=Checkpoints(every=5)), tmp_path, steps=6, profile=True)
    assert any(line.startswith("profile of steps 1 to 5: ") for line in ran.lines)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert Reader(tmp_path / "checkpoints").steps() == [5, 6]
    assert records(tmp_path, "loss") == records(trained.folder, "loss")[:6]


def test_more_steps_than_the_schedule_has_are_not_silently_left_out(trained, do, copied):
    again = do(trained.train, copied, steps=500)
    assert "the run ends at step 12, before the requested 500: raise Train.steps" in again.lines


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tiny, do, tmp_path):
    with pytest.raises(UserError, match=r"vocab is 100, and the tokenizer has \d+ ids, .*set Llama\.vocab"):
        do(replace(tiny, model=replace(tiny.model, vocab=100)), tmp_path)


def test_a_folder_that_cannot_be_is_said_so(tiny, do, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(UserError, match=rf"cannot write {folder}: .* Give another --run-dir"):
            do(tiny, folder)


@pytest.mark.full
def test_metrics_that_are_shortened_or_gone_are_said_so(trained, do, copied):
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    for kept, lacking in [(lines[2:], "2 of the 12 steps so far: 1, 2"), ([], "12 of the 12 steps so far: 1, 2, 3, …")]:
        (copied / "metrics.jsonl").write_text("".join(kept))
        again = do(trained.train, copied)
        assert f"{copied / 'metrics.jsonl'} lacks {lacking}" in again.lines
    assert not [line for line in trained.lines if "lacks" in line]


@pytest.mark.few(torn=("[]",))
@pytest.mark.parametrize("torn", ['{"data": {"dig', "[]", "\x00"], ids=["torn", "a list", "no text"])
def test_a_torn_record_is_an_error_that_says_what_to_delete(trained, do, copied, torn):
    (copied / "run.json").write_text(torn)
    with pytest.raises(UserError, match=rf"{copied / 'run.json'} .*Delete it to continue"):
        do(trained.train, copied)
    (copied / "run.json").unlink()
    do(trained.train, copied)


@pytest.mark.parametrize("part", ["run.json.new", "config.gin.new", "tokenizer.json", "loss.png"])
def test_a_full_disk_is_no_fault_of_ours(tiny, do, tmp_path, part):
    train = replace(tiny, evaluation=None, sample=None)
    if not part.endswith(".new"):  # of a run that has begun: in a new folder it would be somebody else's file
        do(train, tmp_path, steps=1)
        (tmp_path / part).unlink(missing_ok=True)
    (tmp_path / part).symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}.*: No space left on device\. Free some space"):
        do(train, tmp_path, steps=2)


class Full(io.BytesIO):
    """A file on a disk that is full."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_of_the_lock_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda *_, **__: Full())
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}: No space"), RunFolder(tmp_path).locked():
        pytest.fail("it was not held")


def test_a_run_without_a_folder_asks_for_one(tiny):
    with pytest.raises(UserError, match=r"Train\.run_dir is not set"):
        run(tiny)


@pytest.mark.full
def test_memory_that_runs_out_in_a_step_is_explained(tiny, tmp_path, monkeypatch):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")

    class Compiled:
        """A step that compiles, and does not run."""

        __call__ = exhausted

        def memory_analysis(self):
            return jax.jit(lambda x: x).lower(1.0).compile().memory_analysis()

    monkeypatch.setattr("axon.run.training.compile_interruptibly", lambda *_: Compiled())
    with pytest.raises(UserError) as caught:
        run(replace(tiny, run_dir=str(tmp_path / "run")), report=lambda _: None)
    told = str(caught.value)
    assert told.startswith("out of memory on each of this machine's 8 devices, where 8.00 GiB more were asked for.")
    assert "Execution.remat = 'full' ('none' now)" in told


def test_a_model_that_no_memory_holds_is_refused_before_any_work(tiny, tmp_path):
    lines, model = [], replace(tiny.model, vocab=10**9)
    with pytest.raises(UserError, match=r"training needs 9\d\d\.\d\d GiB of memory .*(.|\n)*1\. 119\.21 GiB .*vocab"):
        run(replace(tiny, model=model, run_dir=str(tmp_path / "run")), report=lines.append)
    assert not lines
    assert not (tmp_path / "run").exists()
