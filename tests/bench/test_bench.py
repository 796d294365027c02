"""Every benchmark runs, says what it promises, and says it as JSON."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from axon.commands import bench as command
from axon.data import Bpe, Data, Synthetic
from axon.errors import UserError
from axon.layout import Layout
from scripts import bench
from scripts.bench import checkpoint, importing, overhead, plan, serve, serve_host, train
from scripts.bench import compile as compile_bench
from scripts.bench import data as data_bench
from scripts.bench.reference import MODEL
from scripts.bench.timing import alternate, median_error

TINY = replace(MODEL, vocab=64, embed=16, layers=2, heads=2, kv_heads=2, mlp=32)


def test_an_unknown_benchmark_is_answered_with_the_one_that_was_meant():
    with pytest.raises(UserError, match="Did you mean 'overhead'"):
        bench.run("overhaed")


@pytest.mark.full
def test_checkpoint_gives_speeds_beside_the_disks(tmp_path):
    result = checkpoint.run(megabytes=1, rounds=1, folder=str(tmp_path))
    json.dumps(result, allow_nan=False)
    assert all(result[name] > 0 for name in ("save_ratio", "restore_ratio", "other_mesh_ratio", "verify", "checksum"))
    assert 0 < result["blocking_share"] < 1
    assert len(checkpoint.rows(result)) == 12
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_import_gives_speeds_and_memory(tmp_path):
    result = importing.run(TINY, rounds=1, folder=str(tmp_path))
    json.dumps(result, allow_nan=False)
    assert all(result[name] > 0 for name in ("load", "convert", "load_cpu", "convert_cpu", "convert_memory"))
    assert len(importing.rows(result)) == 7
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_plan_ranks_layouts_as_they_are_measured():
    result = plan.run(replace(TINY, heads=8, kv_heads=8), batch=32, seq=64, rounds=3)
    json.dumps(result, allow_nan=False)
    assert -1 <= result["tau"] <= 1
    assert result["predicted"].keys() == result["measured"].keys()
    assert len(plan.rows(result)) == len(plan.LAYOUTS) + 1 == 9


@pytest.mark.slow
def test_train_gives_tokens_per_second_and_a_ratio_only_against_torch():
    result = train.run(TINY, batch=2, seq=16, rounds=3, bfloat16=True)
    json.dumps(result, allow_nan=False)
    assert result["axon"] > 0
    assert result["axon_bfloat16"] > 0
    assert 0 < result["loss_difference_bfloat16"] < 1e-2
    if find_spec("torch"):
        assert result["ratio"] > 0
        assert result["torch_eager"] > 0
        assert result["torch_compile"] > 0
        assert result["torch_compile_bfloat16"] > 0
        assert result["ratio_bfloat16"] > 0
        assert result["loss_difference"] < 1e-5
    else:
        assert result["torch_eager"] is result["torch_compile"] is result["ratio"] is None
        assert any("pip install torch" in figure for _, figure in train.rows(result))


@pytest.mark.slow
def test_overhead_gives_the_ratio_its_noise_the_work_and_the_hosts_time(capsys):
    result = overhead.run(TINY, batch=2, seq=96, rounds=3, host_steps=20)
    json.dumps(result, allow_nan=False)
    assert result["ratio"] > 0
    assert result["spread"] >= 0
    assert result["host_ms"] > 0
    assert result["flops_ratio"] == 1
    shown = capsys.readouterr()
    assert shown.out == ""  # with --json, the JSON has stdout for itself
    assert "timing" in shown.err
    bench.show("overhead", result)
    assert "host, per step" in capsys.readouterr().out


@pytest.mark.slow
def test_data_compares_the_pipeline_with_what_training_takes(tmp_path):
    data = Data(
        seq=16, batch=2, sources=(Synthetic(documents=50),), tokenizer=Bpe(300), held_out=0.0, store=str(tmp_path)
    )
    result = data_bench.run(data, replace(TINY, vocab=300), seconds=0.1, rounds=3)
    json.dumps(result, allow_nan=False)
    assert result["ratio"] == pytest.approx(result["tokens_per_second"] / result["training"])
    assert result["corpus_tokens"] > 1000


@pytest.mark.slow
def test_compile_gives_times_and_operations_for_each_depth():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    layout = Layout(mesh={"data": 4}, zero=3)
    result = compile_bench.run(TINY, (2, 4), "v5e:2x2", layout, batch=4, seq=32)
    json.dumps(result, allow_nan=False)
    shallow, deep = result["layers"]["2"], result["layers"]["4"]
    assert shallow["operations"] > 100
    assert shallow["lowered"] == deep["lowered"] > 100
    assert all(deep[name] > 0 for name in ("trace", "lower", "compile", "gibibytes"))


def test_steps_take_turns_and_warm_up_rounds_do_not_count():
    calls = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_the_error_of_a_median_is_that_of_many_medians(rng):
    draws = rng.normal(1, 0.1, (2000, 31))
    stated = np.median([median_error(row) for row in draws])
    assert stated == pytest.approx(np.std(np.median(draws, axis=1)), rel=0.15)


@pytest.mark.full
def test_serve_gives_throughputs_and_what_a_prefix_saves():
    result = serve.run(replace(TINY, vocab=128), requests=6, concurrent=4, alone=2, prefix=100, rounds=1)
    json.dumps(result, allow_nan=False)
    assert result["compiles"] == 0
    assert {"engine", "alone", "padded"} <= result["throughput"].keys()
    assert result["first_token"]["cached"] > 0
    assert len(serve.rows(result)) >= 12


def test_less_than_four_hundredths_of_the_cache_are_slots_without_a_token():
    waste = serve_host.page_waste(requests=60, tokens=8192)
    assert 0 < waste["of_cache"] <= waste["of_used"] < 0.04
    assert waste["used"] <= 1


def test_an_installed_package_says_where_benchmarks_are(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "axon" / "commands" / "bench.py"))
    with pytest.raises(UserError) as found:
        command.bench("train")
    assert str(tmp_path / "scripts" / "bench") in str(found.value)
    assert "clone" in str(found.value)
