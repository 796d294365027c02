"""Config.jsons of every family, each field present, absent, null or switched: the logits are those of `transformers`,
or both refuse it, or Axon does by the name of the field."""

import jax
import numpy as np
import pytest
import reference
import variants
from test_transformers import InMemory, evaluate

from axon import axes
from axon.checkpoint.huggingface.config import read_config
from axon.checkpoint.huggingface.copies import with_own_arrays
from axon.checkpoint.huggingface.load import check_weights, read_shard
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_of
from axon.errors import UserError
from axon.nn import parameters, variables
from axon.runtime import nested


def opened(family, case, described):
    """Our config of a case, and the arrays of it."""
    table = table_of(described)
    model = read_config(table, described)
    arrays = variants.arrays(family, case, pieces_of(table, model.build(), getattr(model, "vocab", None)).shapes)
    for copy in table.copies:
        if copy.absent and copy.theirs not in case.stored:  # T5's files have no head, whatever ties it
            arrays.pop(copy.theirs, None)
    source = InMemory(arrays)
    return table, with_own_arrays(table, model, source)[0], source


@pytest.mark.draws(5)
@pytest.mark.few(family=("llama", "phi3", "gemma2", "t5", "deepseek_v3"))
@pytest.mark.parametrize("family", variants.BASES)
def test_a_config_json_is_refused_where_transformers_refuses_it_and_else_by_a_field_s_name(family):
    stored = variants.load(family)
    assert stored.keys() == {case.name for case, _ in variants.cases(family)}
    wrong = []
    for case, described in variants.cases(family):
        try:
            opened(family, case, described)
            said = None
        except UserError as error:
            said = str(error)
        expected = case.refused or (stored[case.name] is None and not case.taken)
        if (said is not None) != expected:
            wrong.append((case.name, stored[case.name] and "taken", said))
        if said is not None and not any(name in said for name in (*case.changes, *case.stored)):
            wrong.append((case.name, "no field is named", said))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.full
@pytest.mark.parametrize("family", variants.BASES)
def test_logits_of_a_config_json_are_those_of_transformers(family, placed, bind):
    stored, computed, errors = variants.load(family), {}, {}
    for case, described in variants.cases(family):
        if stored[case.name] is None or case.refused:
            continue
        table, model, source = opened(family, case, described)
        key = (model, *(array.tobytes() for array in source.arrays.values()))
        if key not in computed:
            computed[key] = variants.some(_logits(family, table, model, source, placed(), bind))
        errors[case.name] = np.abs(np.subtract(computed[key], stored[case.name])).max()
    assert max(errors.values()) < 1e-4, {name: error for name, error in errors.items() if error >= 1e-4}


def _logits(family, table, model, source, placement, bind):
    """Compiled in a hurry: a model runs once."""
    module, vocab = model.build(), getattr(model, "vocab", None)
    pieces = pieces_of(table, module, vocab)
    copies = [copy.theirs for copy in table.copies]
    check_weights(source, pieces, copies, family, "the model")
    specs = parameters(module) | variables(module)
    whole = {path: tuple((0, size) for size in specs[path].shape) for path in pieces.of}
    values = {path: read_shard(source, pieces, path, ranges, np.float32) for path, ranges in whole.items()}
    ids = reference.tokens(family, vocab or 2)
    run = jax.jit(lambda values: evaluate(family, bind(module, nested(values)), ids)[1])
    with (
        jax.set_mesh(placement.mesh),
        axes.activate(axes.Scope(placement, np.float32, np.float32, axes.Execution(unroll=False))),
    ):
        return run.lower(values).compile({"xla_backend_optimization_level": 0})(values)
