"""The memory of a pipeline's slots: what waits on a stage between a chunk's forward and its backward."""

from dataclasses import replace

import jax

from axon.axes.execution import RematByKind
from axon.parallel.pipeline import Table
from axon.parallel.pipeline.rows import SlotBytes
from axon.plan.memory import arguments
from axon.plan.predict.memory import Declared
from axon.train.objective import Batch
from axon.train.optimizers import frozen_paths
from axon.train.pipeline import Pipeline
from axon.train.pipelined import PipelinedGradients
from axon.train.references import Values
from axon.train.state import State
from axon.train.step import Program


def slot_sizes(program: Program, table: Table | None = None, remat: RematByKind | None = None) -> SlotBytes:
    """What waits on a stage for one microbatch and chunk.

    Args:
        table: another than the one that runs, of as many chunks. remat: another policy than the execution's.
    """
    pipeline, runtime = stages_of(program), program.runtime
    frozen, found = frozen_paths(program.optimizer, runtime.parameters), []

    def trace(state: State, batch: Batch, references: Values) -> tuple[()]:
        drawn = program.evaluator.drawn(batch, jax.random.key(program.seed))
        method, drawn = program.beside(state, drawn, references)
        assert isinstance(method, PipelinedGradients)
        found.append(method.slot_bytes(table or pipeline.table, state, drawn, frozen))
        return ()

    execution = runtime.execution if remat is None else replace(runtime.execution, remat=remat)
    with runtime.tracing(execution=execution):
        jax.eval_shape(trace, program.abstract_state(), program.evaluator.abstract_batch, program.references.abstract)
    return found[0]


def declared(program: Program, sizes: SlotBytes) -> Declared:
    """What a pipelined program's own declarations say of its memory. Without a flush its slots are among the state."""
    flush = stages_of(program).table.flush
    return Declared(arguments(program), sizes if flush else SlotBytes(0, 0, 0, 0))


def stages_of(program: Program) -> Pipeline:
    """The pipeline of a program whose mesh has stages."""
    assert program.evaluator.pipeline is not None
    return program.evaluator.pipeline
