"""What `axon plan` prints, writes and refuses."""

import json
from dataclasses import replace

import pytest

from axon.config import ConfigError, dump, load
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.run import placed, program
from axon.show.plan import mesh_text, plans_json, print_plans, write_plan
from axon.show.plan_picture import draw_plans
from axon.show.planning import plan_config
from axon.show.question import Question


@pytest.fixture
def config(tiny, tmp_path):
    path = tmp_path / "tiny.gin"
    path.write_text(dump(replace(tiny)))
    return path


def test_plans_are_json_and_a_table_and_the_best_is_a_file_that_is_laid_over_the_config(config, tmp_path, capsys):
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
    planned = laid_over(config, tmp_path / "planned.gin", "Data.batch=16")
    assert planned.layout == found.plans[0].layout
    assert planned.execution == found.plans[0].execution
    program(planned, Placement.described(planned.layout, 4))


def laid_over(config, path, *changes):
    return load(config, changes, plan=path).tree


def test_a_plan_for_another_model_batch_or_number_of_devices_is_refused(config, tmp_path):
    write_plan(plan_config(Question(config, "h100:2x2"), 1), tmp_path / "planned.gin")
    tree = laid_over(config, tmp_path / "planned.gin")
    with pytest.raises(UserError, match=r"for 4 devices \(h100:2x2\), and there are 8.*axon plan"):
        placed(tree, [None] * 8)
    with pytest.raises(UserError, match="for 4 devices"):
        program(tree)
    mesh = Placement.described(tree.layout, 4)
    for change, part in (
        (f"Llama.embed={2 * tree.model.embed}", f"embed is {tree.model.embed} in the plan and {2 * tree.model.embed}"),
        ("Llama.layers=7", "layers is .* in the plan and 7 here"),
        (f"Data.batch={2 * tree.data.batch}", f"Data.batch is {tree.data.batch} in the plan"),
        (f"Data.seq={tree.data.seq // 2}", "Data.seq is"),
    ):
        with pytest.raises(UserError, match=part):
            program(laid_over(config, tmp_path / "planned.gin", change), mesh)


def test_what_a_plan_does_not_use_is_a_mistake_and_what_it_replaces_is_not(config, tmp_path):
    config.write_text(config.read_text() + "Layout.schedule = @Interleaved()\nInterleaved.virtual = 4\n")
    plan = tmp_path / "planned.gin"
    plan.write_text("Layout.schedule = None\n")
    assert laid_over(config, plan).layout.schedule is None
    assert laid_over(config, plan, "Layout.zero=1").layout.zero == 1
    plan.write_text("Layout.schedule = None\nServe.weights = 'int8'\n")
    with pytest.raises(ConfigError, match=r"planned\.gin:2.*Serve"):
        laid_over(config, plan)


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
        assert laid_over(config, tmp_path / "planned.gin").precision.recipe == best.recipe
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
        ("h100:8", ["Execution.remat={'block': 'full'}"], "--pin Execution.remat"),
    ],
)
def test_a_mistake_is_answered_with_what_to_change(config, on, pins, part):
    with pytest.raises(UserError) as raised:
        plan_config(Question(config, on, pins=tuple(pins)), 3)
    assert part in str(raised.value)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_chip_of_ones_own_is_a_value_in_a_file_that_the_config_imports(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    chip = "from dataclasses import replace\nfrom axon.chips import CHIPS as KNOWN\n"
    chip += 'CHIPS = (replace(KNOWN["h100"], name="h100-twice", peak=2 * KNOWN["h100"].peak),)\n'
    (tmp_path / "chip_of_ones_own.py").write_text(chip)
    config.write_text(f"import chip_of_ones_own\n{config.read_text()}")
    own, known = (
        plan_config(Question(config, f"{name}:2", (), ("Layout.zero=0",)), 1) for name in ("h100-twice", "h100")
    )
    assert own.target.chip.peak == 2 * known.target.chip.peak
    assert own.plans[0].seconds.total < known.plans[0].seconds.total


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


def test_a_plan_is_written_into_a_gin_file_only(config, tmp_path):
    found = plan_config(Question(config, "h100:2"), 1)
    with pytest.raises(UserError, match=r"--write.*\.gin"):
        write_plan(found, tmp_path / "plan.txt")
