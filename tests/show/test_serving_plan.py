"""What `axon plan` prints, writes and refuses of a model that is served."""

import json

import pytest
from typer.testing import CliRunner

from axon.cli import app
from axon.config import load
from axon.errors import UserError
from axon.layout import Placement
from axon.run import serving_program
from axon.show.question import Question
from axon.show.serving_plan import plan_serving, print_serving_plans, serving_plans_json, write_serving_plan

CONFIG = "configs/serve/llama3_8b_v6e.gin"
WORKLOAD = {"requests_per_second": 40, "prompt_tokens": 800, "answer_tokens": 200, "ttft_ms": 500, "tpot_ms": 30}


@pytest.fixture
def traffic(tmp_path):
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


@pytest.fixture
def config(request):
    return request.config.rootpath / CONFIG


def test_plans_are_json_and_a_table_and_the_best_is_laid_over_the_config(config, traffic, tmp_path, capsys):
    found = plan_serving(Question(config, "v6e:4x4", formats=("bfloat16", "int8")), traffic, 3)
    told = json.loads(json.dumps(serving_plans_json(found)))
    best, *others = told["plans"]
    assert {"devices", "engines", "tensor", "weights", "capacity", "ttft_ms", "tpot_ms", "utilisation"} <= set(best)
    assert best["devices"] == best["engines"] * best["tensor"]
    assert len(others) == 2
    assert all(one["why_not"] for one in others)
    print_serving_plans(found)
    assert "plan 2: " in capsys.readouterr().out
    write_serving_plan(found, tmp_path / "planned.gin")
    tree = load(config, root="Serve", plan=tmp_path / "planned.gin").tree
    assert (tree.weights, tree.capacity.requests) == (best["weights"], best["capacity"]["requests"])
    program = serving_program(tree, Placement.described(tree.layout, best["devices"], "tpu"))
    assert program.parameter_bytes() + program.cache_bytes() == found.plans[0].memory


def test_too_few_heads_of_keys_are_copied(config, traffic, tmp_path):
    changes = ("Llama.kv_heads=2", "Llama.layers=4")
    found = plan_serving(Question(config, "v6e:2x2", changes), traffic, 5)
    four = next(plan for plan in found.plans if plan.kind.tensor == 4)
    assert four.kind.program.runtime.placement.layout.replicate_kv == 2


def test_a_split_that_the_model_refuses_is_told_with_why(config, traffic, capsys):
    changes = ("Llama.heads=6", "Llama.kv_heads=2", "Llama.head_dim=128", "Llama.layers=4")
    found = plan_serving(Question(config, "v6e:2x2", changes), traffic, 5)
    assert {plan.kind.tensor for plan in found.plans} == {1, 2}
    (told,) = serving_plans_json(found)["without_plan"]
    assert (told["weights"], told["tensor"]) == ("auto", 4)
    assert "heads" in told["reason"]
    print_serving_plans(found)
    assert f"no plan with tensor 4, auto: {told['reason']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "formats", "part"),
    [
        ((), ("int88",), "--format int88.*Did you mean 'int8'"),
        (("Serve.draft='mtp'",), (), "Serve.draft"),
        (("Capacity.length=512",), (), "prompt_tokens.*Capacity.length"),
    ],
)
def test_a_mistake_is_answered_with_what_to_change(config, traffic, changes, formats, part):
    with pytest.raises(UserError, match=part):
        plan_serving(Question(config, "v6e:2x2", changes, formats=formats), traffic, 1)


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        (CONFIG, [], "--traffic FILE.json"),
        (CONFIG, ["--traffic", "--compile"], "--compile is for a config that trains"),
        (CONFIG, ["--traffic", "--mtbf", "5"], "--mtbf is for a config that trains"),
        ("configs/quickstart.gin", ["--traffic"], "trains one: leave it out"),
    ],
)
def test_options_of_training_and_of_serving_are_told_apart(request, traffic, name, options, part):
    given = [one for option in options for one in ((option, str(traffic)) if option == "--traffic" else (option,))]
    found = CliRunner().invoke(app, ["plan", str(request.config.rootpath / name), "--on", "v6e:2x2", *given])
    assert isinstance(found.exception, UserError)
    assert part in str(found.exception)
