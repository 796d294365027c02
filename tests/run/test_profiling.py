"""Traced steps of runs: exactly those that were named, and what they are read as."""

from dataclasses import replace

import pytest
from reports import silent

from axon.axes import Execution
from axon.checkpoint import Reader
from axon.errors import UserError
from axon.plan.profile.beside import IDLE, beside
from axon.plan.profile.profile import OTHER_PROGRAMS
from axon.plan.profile.roles import LOOPS, UNNAMED
from axon.plan.profile.tables import json_of, tables
from axon.run.profiled import profiled
from axon.run.profiling import check_profiled, profile_tables, read_profile, steps_to_trace
from axon.run.reporting import RunReport
from axon.show.profile import predicted_here


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((5, 4), "--profile 5:4 has no steps: .* Write --profile 4:5"),
        ((0, 2), "the first step of a run is 1"),
        ((3, 13), "ends at step 12"),
    ],
)
def test_steps_that_a_run_does_not_have_are_refused(asked, message):
    with pytest.raises(UserError, match=message):
        check_profiled(asked, 12)


def test_steps_before_the_one_that_a_run_continues_from_are_refused():
    with pytest.raises(UserError, match=r"--profile 5:7: the run continues from step 5, .* from 6 on"):
        steps_to_trace((5, 7), 5, 12)
    assert steps_to_trace((6, 7), 5, 12) == (6, 7)
    assert steps_to_trace(True, 5, 12) == (6, 10)
    assert steps_to_trace(True, 10, 12) == (11, 12)
    assert steps_to_trace(False, 5, 12) is None


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_profiled_run_keeps_no_checkpoint_and_its_lines_add_up_beside_the_prediction(tiny, few, caches, tmp_path):
    tree = replace(tiny, execution=Execution(remat="full"))
    with few(1):
        folder = profiled(tree, 2, tmp_path / "run", silent)
        predicted = predicted_here(tree, pytest.fail)
    assert not Reader(tmp_path / "run" / "checkpoints").steps()
    facts, profile = read_profile(folder)
    assert (facts.first, facts.last, profile.steps) == (3, 4, 2)
    assert all(row.calls == round(row.calls) for row in profile.rows if row.role.module == "update")
    lines = beside(profile, predicted)
    assert sum(one.measured or 0.0 for one in lines) == pytest.approx(profile.seconds)
    assert sum(one.predicted or 0.0 for one in lines) == pytest.approx(predicted.total)
    assert all(one.measured is not None for one in lines)  # each predicted line is seen in the step
    assert {one.name for one in lines if one.predicted is None} <= {IDLE, LOOPS, UNNAMED, OTHER_PROGRAMS}
    found = json_of(profile, lines)
    assert sum(one["seconds"] for one in found["operations"]) + found["idle_s"] == pytest.approx(found["step_s"])
    shown = tables(profile, lines, facts.flops, facts.memory)
    assert all(len(row) == len(table.headings) for table in shown for row in table.rows)
    assert facts.flops.keys() >= {"attention", "mlp", "loss"}
    assert [one.title for one in profile_tables(folder)] == [one.title for one in shown]
    RunReport(tmp_path / "run").write_page(tmp_path / "page.html")
    assert "<h2>Profile: work by module, ms</h2>" in (tmp_path / "page.html").read_text("utf-8")
    with pytest.raises(UserError, match=r"\(--to\) has a run"):
        profiled(tree, 2, tmp_path / "run", silent)


@pytest.mark.full
def test_within_a_run_exactly_the_named_steps_are_traced_over_a_save_and_an_evaluation(tiny, do, tmp_path):
    ran = do(tiny, tmp_path, steps=12, profile=(9, 11))
    assert f"profile of steps 9 to 11: {tmp_path / 'profile'}" in ran.lines
    _, profile = read_profile(tmp_path / "profile")
    assert {round(row.calls, 6) for row in profile.rows if row.role.module == "update"} == {1}
    assert Reader(tmp_path / "checkpoints").steps() == [10, 12]
