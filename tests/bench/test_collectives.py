"""`axon bench collectives`: what it fits, writes and says, and what `axon plan --links` makes of it."""

import json

import jax
import pytest
from typer.testing import CliRunner

from axon.chips import CHIPS
from axon.chips.target import Target
from axon.cli import app
from axon.config import dump
from axon.errors import UserError
from axon.plan.predict.links import Bandwidths
from scripts.bench import collectives
from scripts.bench.fit_links import COLLECTIVES, Scope, Timing, fit


@pytest.mark.parametrize("name", ["h100:4x8", "2*v5e:4x4", "h100:1x8", "v5p:4x4x4"])
def test_the_fit_recovers_planted_latencies_and_bandwidths(name, rng):
    target = Target.of(name, dict(CHIPS))
    link, network = rng.uniform(1e9, 1e12), rng.uniform(1e8, 1e11)
    latency, network_latency = rng.uniform(1e-6, 1e-3), rng.uniform(1e-6, 1e-3)
    planted = Bandwidths(link, network, 1e10, latency, network_latency)
    timings = [
        Timing(scope, collective, size, predicted)
        for scope in collectives.scopes(target)
        for collective in COLLECTIVES
        for size in collectives.SIZES
        if (predicted := Timing(scope, collective, size, 1.0).predicted(target, planted))
    ]
    expected = {"link": link, "latency": latency}
    if target.devices > target.linked:
        expected |= {"network": network, "network_latency": network_latency}
    assert fit(timings, target) == pytest.approx(expected, rel=1e-4)


def test_bandwidths_are_those_of_nccl_tests(rng):
    devices, size, seconds = int(rng.integers(2, 64)), int(rng.integers(1, 2**30)), float(rng.uniform(1e-6, 1))
    scope = Scope("within", {"near": devices}, "near")
    factors = dict.fromkeys(COLLECTIVES, (devices - 1) / devices)
    factors |= {"all-reduce": 2 * (devices - 1) / devices, "ring permute": 1.0}
    for collective, factor in factors.items():
        one = Timing(scope, collective, size, seconds)
        assert one.algorithm_bandwidth == pytest.approx(size / seconds)
        assert one.bus_bandwidth == pytest.approx(one.algorithm_bandwidth * factor)
        assert one.sent == pytest.approx(size * factor)


@pytest.mark.full
@pytest.mark.draws(1)
def test_links_are_written_and_a_plan_made_with_them_says_so(tmp_path, tiny, monkeypatch):
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: four)
    monkeypatch.setattr(collectives, "CPU_SIZES", (2**10, 2**16, 2**20))
    links, config = tmp_path / "links.json", tmp_path / "tiny.gin"
    config.write_text(dump(tiny))
    measured = CliRunner().invoke(app, ["bench", "collectives", "--json", "--out", str(links)])
    assert measured.exit_code == 0, measured.output
    result = json.loads(measured.stdout.splitlines()[-1])
    assert result["links"] == json.loads(links.read_text())
    assert result["machine"] == "cpu:1x4"
    assert "latency" in result["links"]
    assert set(result["links"]) <= {"link", "latency"}
    assert len(result["timings"]) == 3 * len(COLLECTIVES)
    assert all(one["seconds"] > 0 and one["devices"] == 4 for one in result["timings"])
    assert len(collectives.rows(result)) == 2 + 3 * len(COLLECTIVES) + len(result["links"])
    planned = CliRunner().invoke(app, ["plan", str(config), "--on", "h100:4", "--links", str(links)])
    assert planned.exit_code == 0, planned.output
    assert f"links as measured: {links}" in planned.stdout


def test_collectives_do_what_they_are_called(rng):
    """Each leaves, of an array a device, what its definition says; a program times these and no others."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("near",))
    spec = jax.sharding.PartitionSpec("near")
    x = rng.standard_normal((4, 8)).astype("float32")

    def result(name):
        body = collectives._BODIES[name]
        mapped = jax.shard_map(lambda y: body("near", y), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.device_get(jax.jit(mapped)(x.reshape(-1))).reshape(4, 8)

    total = x.sum(0)
    assert result("all-reduce") == pytest.approx(total + 0 * x, abs=1e-5)
    assert result("all-gather") == pytest.approx(x[:, :2].reshape(-1) + 0 * x)
    assert result("reduce-scatter")[:, :2] == pytest.approx(total.reshape(4, 2), abs=1e-5)
    assert result("all-to-all") == pytest.approx(x.reshape(4, 4, 2).transpose(1, 0, 2).reshape(4, 8))
    assert result("ring permute") == pytest.approx(x[[3, 0, 1, 2]])


def test_one_device_is_told_plainly(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    with pytest.raises(UserError, match="this process has one"):
        collectives.run()


def test_another_benchmark_writes_no_links(tmp_path):
    refused = CliRunner().invoke(app, ["bench", "data", "--out", str(tmp_path / "x.json")])
    assert "--out is for `axon bench collectives` only" in str(refused.exception)
