"""What `axon plan` prints, writes and refuses."""

import json
from dataclasses import replace

import pytest

from axon.config import dump, load
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.run import program
from axon.show.plan import mesh_text, plans_json, print_plans, write_plan
from axon.show.plan_picture import draw_plans
from axon.show.planning import plan_config
from axon.show.question import Question


@pytest.fixture
def config(tiny, tmp_path):
    path = tmp_path / "tiny.gin"
    path.write_text(dump(replace(tiny)))
    return path


def test_plans_are_json_and_a_table_and_the_best_is_a_config_to_run(config, tmp_path, capsys):
    found = plan_config(Question(config, "h100:2x2", ("Data.batch=16",), ("Layout.zero=3",)), 3)
    told = json.loads(json.dumps(plans_json(found)))
    assert (told["target"], told["devices"]) == ("h100:2x2", 4)
    best, *others = told["plans"]
    assert {"layout", "execution", "memory_gib", "step_s", "mfu", "lines"} <= set(best)
    assert best["layout"]["zero"] == 3
    assert "why_not" not in best
    assert all(one["why_not"] for one in others)
    print_plans(found)
    out = capsys.readouterr().out
    assert "memory of a device" in out
    assert "predicted, not measured" in out
    draw_plans(found, tmp_path / "plans.png")
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")
    write_plan(found, tmp_path / "planned.gin")
    tree = load(tmp_path / "planned.gin").tree
    assert tree.layout.mesh == found.plans[0].layout.mesh
    assert (tree.layout.zero, tree.data.batch) == (3, 16)
    assert tree.execution.remat == found.plans[0].execution.remat
    program(tree, Placement.described(tree.layout, 4))
    with pytest.raises(UserError, match="= 4 devices, and there are 8"):
        program(tree, Placement.of(tree.layout, [None] * 8))


@pytest.mark.full
def test_formats_are_ranked_together_and_each_of_them_is_among_the_plans(config, tmp_path, capsys):
    question = Question(config, "h100:2", ("Data.batch=16",), formats=("none", "FP8Current"))
    found = plan_config(question, 1)
    alone = [plan_config(Question(config, "h100:2", one.overrides), 1).plans[0] for one in question.of_each_format()]
    assert sorted(one.seconds.total for one in alone) == [one.seconds.total for one in found.plans]
    assert sorted(one["recipe"] or "none" for one in plans_json(found)["plans"]) == ["FP8Current", "none"]
    print_plans(found)
    assert {"format", "none", "FP8Current"} <= {*capsys.readouterr().out.split()}
    for best in found.plans:
        write_plan(replace(found, plans=(best,)), tmp_path / "planned.gin")
        assert load(tmp_path / "planned.gin").tree.precision.recipe == best.recipe
    for name, part in (("FP8Curent", "Did you mean"), ("MXFP8", "needs products of")):
        with pytest.raises(UserError, match=part):
            plan_config(Question(config, "h100:2", formats=("none", name)), 1)


@pytest.mark.parametrize(
    ("on", "pins", "part"),
    [
        ("h10:8", [], "Did you mean 'h100'"),
        ("cpu:2x4", [], "cpu:8"),
        ("h100:8", ["Data.batch=8"], "--set"),
        ("h100:8", ["Layout.mesh={'tensor': 3}"], "--pin Layout.mesh"),
        ("h100:8", ["Execution.remat={'gate': 'offload'}"], "--pin Execution.remat"),
    ],
)
def test_a_mistake_is_answered_with_what_to_change(config, on, pins, part):
    with pytest.raises(UserError) as raised:
        plan_config(Question(config, on, pins=tuple(pins)), 3)
    assert part in str(raised.value)


def test_a_plan_says_which_rows_are_not_the_defaults():
    rows = {"wide": "tensor", "taps": None, "heads": None, "seq.residual": ("context", "tensor")}
    assert mesh_text(Layout({"data": 2, "tensor": 4}, rows)) == "data 2 × tensor 4, seq, wide split, heads whole"


@pytest.mark.full
@pytest.mark.draws(1)
def test_this_machine_is_a_target(config):
    found = plan_config(Question(config, "cpu:4"), 2)
    chip, (best, *_) = found.target.chip, found.plans
    assert (found.target.devices, found.target.platform) == (4, "cpu")
    assert 0 < best.memory.total < chip.memory
    assert 0 < best.seconds.mfu < 1
    assert not [line.name for line in best.seconds.lines if line.hidden or "bubble" in line.name]
    with pytest.raises(UserError, match="--compile"):
        plan_config(Question(config, "cpu:4"), 1, print)


def test_a_plan_is_written_into_a_config_only(config, tmp_path):
    found = plan_config(Question(config, "h100:2"), 1)
    with pytest.raises(UserError, match=r"--write.*\.gin"):
        write_plan(found, tmp_path / "plan.txt")
