"""Carrying out a run: prepare, train or continue, evaluate, save, sample."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax

from axon.checkpoint import open_store
from axon.checkpoint.huggingface.hub import copy_companions
from axon.data import FeedConfig, Prepared
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.launch.agree import AgreedStop, check_alike, largest, process_0_first
from axon.launch.mesh import check_mesh
from axon.launch.signals import Interrupts
from axon.launch.watchdog import Hang, Watchdog
from axon.observe.events import events
from axon.observe.journal import journal
from axon.observe.metrics import held_out_losses
from axon.observe.record import run_record
from axon.plan.out_of_memory import check_memory, memory_explained
from axon.run.account import account_of, data_account
from axon.run.answers import answers_of
from axon.run.before import check_not_lost, check_own_checkpoints, check_separate_folders
from axon.run.branch import PARENT, Branch
from axon.run.build import program
from axon.run.folder import RunFolder
from axon.run.held_out import held_out_loss
from axon.run.init_from import InitFrom
from axon.run.initial_values import InitialValues
from axon.run.mirrored import copying, fetched
from axon.run.profiling import Asked, Profiling, Steps, check_profiled, steps_to_trace
from axon.run.references import REFERENCES, check_same_references, read_references, sources_of
from axon.run.restore import IN_FLIGHT, check_finite, check_same_mesh, lost_in_flight, restore_state
from axon.run.saves import Saves
from axon.run.stages import with_stages_done
from axon.run.start_record import changes, changes_text, described, dtype_notices, script_notices
from axon.run.training import Position, Training, lost_time
from axon.run.tree import Sample, Train
from axon.runtime import Runtime
from axon.serve.offline import write
from axon.serve.request import Request
from axon.serve.text_model import check_request
from axon.train.loop import Record
from axon.train.optimizers import frozen_paths, schedule_notices
from axon.train.state import State
from axon.train.step import Program

HANG_LINGER_SECONDS = 5.0
"""A process that hung ends so much after it has said so: the others, which wait for it, say so within that time."""


def run(
    train: Train, *, steps: int | None = None, profile: Asked = False, report: Callable[[str], None] = print
) -> State:
    """A whole run: prepare the data, train or continue, evaluate, sample, save. Returns the last state.

    `steps` stops earlier, without changing the schedule; `profile` traces its first steps, or those from one to
    another, as (50, 53), into `profile/` in its folder; `report` is called with each line of output. Raises `UserError`
    for what a person has to change, `Interrupted` after saving.
    """
    return _carried_out(train, {}, steps, profile, report)


def _carried_out(
    train: Train, checked: dict[str, "Session"], steps: int | None, profile: Asked, report: Callable[[str], None]
) -> State:
    """As `run`; `checked`: by folder, what is ready of runs that were checked before others, and taken out here."""
    check_alike("configuration", lambda: account_of(train, steps=steps, profile=profile))

    def check(one: Train) -> None:
        checked[str(one.folder)] = Session(one, report).checked()

    train = with_stages_done(train, check, lambda stage: _carried_out(stage, checked, None, False, report))
    return (checked.pop(str(train.folder), None) or Session(train, report)).run(steps, profile)


Source = InitialValues | Branch | None


class Session:
    """One call of `run`; `saves`: what becomes of its states."""

    def __init__(self, train: Train, report: Callable[[str], None], saves: type[Saves] = Saves):
        self.train, self.folder, self._saves = train, RunFolder(train.folder), saves
        self.first = jax.process_index() == 0
        self.report = report if self.first else _ignore
        self._ready: tuple[Prepared, list[str]] | None = None
        """The data, once it is checked, and the lines about it, which are reported when the run begins."""

    def checked(self) -> "Session":
        """The session, with functions and data ready, where other runs come before. Raises the `UserError` that `run`
        would for them."""
        report, lines = self.report, list[str]()
        self.report = lines.append
        self.program = self._program()
        with process_0_first("check"):
            corpus = self._corpus(None)
        self.report, self._ready = report, (corpus, lines)
        return self

    def run(self, steps: int | None, profile: Asked) -> State:
        if jax.process_count() > 1:
            check_mesh(self.train.layout)
        if self._ready is None:
            self.program = self._program()
        if (used := self.program.placement.mesh.size) < jax.device_count():
            self.report(f"Layout.mesh is of {used} of the {jax.device_count()} devices there are: the first are used")
        self.program.update.claim_disk()
        until = self._last_step(steps)
        check_profiled(profile, until)
        notices = schedule_notices(self.train.optimizer, self.train.steps)
        for line in (*notices, *dtype_notices(self.program)):
            self.report(line)
        with ExitStack() as stack:
            with process_0_first("prepare"):
                self.reconfigured = self.folder.check_continues(self.train)
                check_separate_folders(self.train, self.folder)
                check_own_checkpoints(self.train, self.folder)
                mirrored = fetched(self.train, self.folder, self.report) if self.first else None
                check_not_lost(self.train, self.folder)
                source = self._source()  # a mistake is reported now, not when the data is ready
                frozen = sources_of(self.train, self.program.references, self.report)
                self.frozen = {name: one.digest() for name, one in frozen.items()}
                corpus = self._corpus(source)
                if self.first:
                    stack.enter_context(self.folder.locked())
                record = self._claim_folder(corpus, source)
            check_alike("data", lambda: data_account(self.folder, corpus, source, self.frozen))
            self.events = stack.enter_context(events(self.folder.events))
            self.interrupts = stack.enter_context(Interrupts())
            self.stop = AgreedStop(self.interrupts)
            self.watchdog = stack.enter_context(self._watchdog())
            before, here = self.events.last("start"), described(self.program, until)
            self.events.record("start", **here)
            self.watchdog.enter("restore")
            self.store = stack.enter_context(
                open_store(
                    self.folder.checkpoints, self.train.checkpoints, self.folder.identity(), self.folder.identifier()
                )
            )
            mirror = stack.enter_context(copying(self.train, mirrored, self.store, self.events, self.watchdog))
            self.saves = stack.enter_context(self._saves(self.store, self.events, mirror))
            self.store.losses.update(held_out_losses(self.folder.metrics))
            self.journal = stack.enter_context(journal(self.folder, self.train.trackers, until, self.report))
            stack.enter_context(memory_explained(self.program))
            state, start, tokens = self._begin(source)
            text = None if corpus.tokenizer is None else corpus.tokenizer.to_json()
            read_references(self.train, self.program.references, frozen, text, self.report)
            if start:
                self._make_durable(state, start)
            self._leave_if_asked()
            self._resumed(start, before, here, self.journal.begin(record, start))
            traced = steps_to_trace(profile, start, until) if self.first else None
            if start < until:
                state = self._train(corpus, Position(state, start, tokens), until, source, traced)
            else:
                self.report(f"nothing left to train: the checkpoint is of step {start}, and the run ends at {until}")
            self._finish(corpus, state)
        return state

    # ---- before ---------------------------------------------------------------------------------------------------

    def _program(self) -> Program:
        """The run's functions. Raises for a layout that cannot hold or sample the model, first of all."""
        made, data = program(self.train), self.train.data
        if isinstance(data, FeedConfig):
            data.check_runtime(made.runtime)
        check_memory(made)
        return made

    def _source(self) -> Source:
        """What this run's parameters are read from; None for a run that has a checkpoint of its own."""
        if self.train.init_from is None or self.folder.reader(self.train.checkpoints).latest() is not None:
            return None
        if isinstance(self.train.init_from, InitFrom) and self.train.init_from.optimizer:
            return Branch.of(self.train, self.train.init_from)
        return InitialValues.of(self.train, self.program.runtime, self.report)

    def _corpus(self, source: Source) -> Prepared:
        """The data, prepared once, and `answers`."""
        if self._ready is None:
            corpus = self.train.data.prepare(self.report)
            self.program.evaluator.check_arrays(corpus.arrays)
            corpus.check_fits(self.train.model, self.train.objective, self.train.seq)
            self.answers = answers_of(self.train, corpus, self.program, self.report)
        else:
            (corpus, lines), self._ready = self._ready, None
            for line in lines:
                self.report(line)
        if corpus.tokenizer is not None:
            self._check_tokens(source, corpus.tokenizer)
        return corpus

    def _check_tokens(self, source: Source, tokenizer: Tokenizer) -> None:
        if source is not None:
            source.check_same_tokens(tokenizer.to_json(), self.program.runtime)
        if self.train.sample is not None:  # a mistake is reported now, not after the last step
            check_request(self.program.module, request_of(self.train.sample, tokenizer), tokenizer)

    def _claim_folder(self, corpus: Prepared, source: Source) -> dict[str, Any]:
        """Record this run in its folder, unless the folder has another run; returns the record."""
        if self.first:
            self.folder.check_same_text(self.train, corpus.identity())
        record = run_record() | {"data": corpus.identity(), "loss_unit": self.program.evaluator.unit}
        parent = source.parent if isinstance(source, Branch) else self.folder.parent()
        record |= {PARENT: parent} if parent else {}
        if self.first:
            self.folder.write(self.train, record)
            for line in script_notices(self.folder.config.read_text("utf-8")):
                self.report(line)
            if corpus.tokenizer is not None:
                corpus.tokenizer.save(self.folder.tokenizer)
            kept = corpus.companions or (source and source.companions(self.program.runtime))
            if kept is not None:
                copy_companions(kept, self.folder.companions)
            if corpus.remarked:
                self.report(f"where each of these examples is: {self.folder.write_remarked(corpus.remarked)}")
        return record

    def _watchdog(self) -> Watchdog:
        stacks = self.folder.path / f"stacks-{jax.process_index()}.txt"
        linger = HANG_LINGER_SECONDS if jax.process_count() > 1 else 0.0
        return Watchdog(self.train.faults.hang_limit, stacks, self._hung, linger)

    def _last_step(self, steps: int | None) -> int:
        if steps is not None and steps > self.train.steps:
            self.report(f"the run ends at step {self.train.steps}, before the requested {steps}: raise Train.steps")
        return min(steps or self.train.steps, self.train.steps)

    def _begin(self, source: Source) -> tuple[State, int, int]:
        """The state to start from, its step, and the number of tokens it was trained on."""
        program = self.program
        count = sum(spec.size for spec in program.parameters.values())
        mesh = " × ".join(f"{name} {size}" for name, size in program.placement.mesh.shape.items())
        self.report(f"model: {count:,} parameters on mesh {mesh} ({program.placement.platform})")
        if self.store.latest() is not None:
            state, extra = self.store.newest(self._restored)
            for line in self.store.notices:
                self.report(line)
            self.store.notices.clear()
            check_same_references(extra.get(REFERENCES, {}), self.frozen)
            check_finite(self.store.of_step(), program.runtime, state.parameters)
            self.report(f"resumed from step {int(state.step)}")
        elif isinstance(source, Branch):
            state, extra = source.restore(program, self.report)
        else:
            self.extra = {}
            if source is None:
                return program.init(), 0, 0
            frozen = frozen_paths(program.optimizer, program.parameters)
            return program.begin(source.read(program.runtime, self.train.seed, self.report, frozen)), 0, 0
        if lost := lost_in_flight(extra, program):
            self.report(lost)
        self.extra = extra
        return state, int(state.step), extra["tokens"]

    def _restored(self) -> tuple[State, dict[str, Any]]:
        check_same_mesh(self.store.of_step().extra().get("mesh", {}), self.program.update.mesh)
        return restore_state(self.store.of_step(), self.program)

    def _make_durable(self, state: State, step: int) -> None:
        """Saves what was restored from the local folder, or from another run, in the durable one too: this run may end
        before its next save, the local folder with its machine, and the other run may delete its own."""
        is_new = self.store.latest() is None
        self.saves.save(step, state, self.extra | {IN_FLIGHT: self.program.in_flight}, self.program.specs)
        if is_new:
            self.saves.wait()
            self.events.record("branch", **self.extra[PARENT])

    # ---- training -------------------------------------------------------------------------------------------------

    def _train(self, corpus: Prepared, start: Position, until: int, source: Source, traced: Steps | None) -> State:
        return Training(
            self.train,
            self.program,
            corpus,
            folder=self.folder.path,
            store=self.store,
            saves=self.saves,
            journal=self.journal,
            events=self.events,
            watchdog=self.watchdog,
            interrupts=self.interrupts,
            stop=self.stop,
            report=self.report,
            begin=lambda: Position(*self._begin(source)),
            parent=self.extra.get(PARENT),
            frozen=self.frozen,
            evaluate=lambda state: self._evaluate(corpus, state),
            evaluate_if_missing=lambda state: self._evaluate_if_missing(corpus, state),
            profiling=Profiling(self.folder.profile, traced, self.program, self.report),
        )(start, until)

    def _resumed(self, start: int, before: Record | None, here: Record, dropped: Sequence[Record]) -> None:
        """Says what has changed since the start before, and how much of it is done again."""
        if before is None:
            return
        changed, lost = changes(before, here) | self.reconfigured, lost_time(dropped)
        self.events.record("resume", start, changed=changed, **lost)
        if lost["lost_steps"]:
            self.report(f"{'' if start else 'no checkpoint yet; '}{lost['lost_steps']} steps are done again")
        if changed:
            self.report(f"changed since the last start: {changes_text(changed)}")

    def _leave_if_asked(self) -> None:
        self.stop.ask()
        self.stop.check()

    def _hung(self, hang: Hang) -> None:
        self.events.record("hang", hang.step, phase=hang.phase, seconds=round(hang.seconds, 1), stacks=str(hang.stacks))

    # ---- after ----------------------------------------------------------------------------------------------------

    def _evaluate(self, corpus: Prepared, state: State) -> None:
        evaluation = self.train.evaluation
        assert evaluation is not None
        began = time.monotonic()
        with self.watchdog.during("evaluation", int(state.step)):
            values = self.program.evaluated(state)
            found = held_out_loss(self.program.evaluator, corpus, values, state.variables, evaluation.batches)
            answered = self.answers and self.answers(replace(state, parameters=values))
        measured = found.metrics() | (answered.metrics() if answered else {})
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        step, seconds = int(state.step), round(time.monotonic() - began, 6)
        shown = {"answers": answered.shown()} if answered else {}
        self.events.record("evaluation", step, seconds=seconds, loss=found.loss, **shown)
        self.store.losses[step] = found.loss
        self.journal.evaluated({"step": step} | metrics)
        self.report(f"step {step}: validation {found}{f', {answered}' if answered else ''}")

    def _evaluate_if_missing(self, corpus: Prepared, state: State) -> None:
        if not int(largest(self.journal.has_evaluation(int(state.step)))):
            self._evaluate(corpus, state)

    def _finish(self, corpus: Prepared, state: State) -> None:
        self.watchdog.enter("end", int(state.step))
        if self.train.evaluation is not None:
            self._evaluate_if_missing(corpus, state)
        self._leave_if_asked()
        if self.train.sample is not None and corpus.tokenizer is not None:
            values, sample = self.program.evaluated(state), self.train.sample
            try:
                text = sample_text(self.program.runtime, values, state.variables, corpus.tokenizer, sample)
            except UserError as error:  # the run has done its work
                text = f"no sample: {error}"
            self.report(text)
        self._leave_if_asked()
        self.journal.plot(self.program.evaluator.unit)
        self.saves.wait()
        self.report(f"loss curve: {self.folder.plot}")
        if self.store.latest() is not None:
            self.report(f"checkpoint: {self.folder.checkpoints / str(int(state.step))}")


def _ignore(line: str) -> None:
    """`report` of every process but the first."""


def request_of(sample: Sample, tokenizer: Tokenizer) -> Request:
    """The request for a sample."""
    return Request(tuple(tokenizer.prompt(sample.prompt)), sample.sampling)


def sample_text(runtime: Runtime, parameters: Any, variables: Any, tokenizer: Tokenizer, sample: Sample) -> str:
    """The prompt of `sample`, continued; of an encoder–decoder its answer alone. Raises `UserError` where the model's
    logits are not numbers."""
    (answer,) = write(runtime, parameters, variables, tokenizer, [request_of(sample, tokenizer)])
    if answer.error is not None:
        raise UserError(answer.error)
    return answer.text if runtime.module.start_id is not None else sample.prompt + answer.text
