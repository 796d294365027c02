"""What `axon show` prints."""

import math
import re
from dataclasses import replace

import pytest

from axon.config import dump
from axon.errors import UserError
from axon.layout import Layout, LayoutError, Placement
from axon.run import Serve, program, serving_program
from axon.serve.capacity import Capacity
from axon.show.show import show_config
from models.llama import Llama

SIX = Placement.described(Layout(mesh={"data": 3, "tensor": 2}), 6)


@pytest.fixture
def shown(tiny, tmp_path, capsys):
    """shown(*overrides, **options of show_config): what is printed of the tiny run's configuration."""

    def of(*overrides, **options):
        (tmp_path / "tiny.gin").write_text(dump(replace(tiny)))
        show_config(tmp_path / "tiny.gin", overrides, **options)
        return capsys.readouterr().out

    return of


def numbers(line):
    return [int(found.replace(",", "")) for found in re.findall(r"\b\d[\d,]*\b", line)]


def test_every_value_has_the_place_where_it_was_written(shown):
    out = shown("Llama.layers=3")
    assert re.search(r"Llama\.layers = 3 +# --set\n", out)
    assert re.search(r"Llama\.embed = 32 +# .*tiny\.gin:\d+\n", out)


def test_the_mesh_needs_no_devices_and_says_what_each_axis_splits(shown):
    out = shown("Layout.mesh={'data': 4, 'tensor': 4}", "Layout.zero=3", "Data.batch=16")
    assert "mesh of 16 devices" in out
    assert re.search(r"data +4 +batch +batch embed", out)
    assert re.search(r"tensor +4 +heads kv_heads mlp vocab", out)


def test_every_parameter_has_a_row_and_the_totals_are_their_sums(shown, tiny):
    out = shown("Layout.mesh={'data': 4, 'tensor': 2}", "Layout.zero=1")
    paths = list(program(tiny).parameters)
    table = {line.split()[0]: line for line in out.splitlines() if line.split() and line.split()[0] in paths}
    assert set(table) == set(paths)
    assert re.search(r"head +embed vocab +32 × 320 +– tensor +20,480", table["head"])
    held = sum(numbers(line)[-1] for line in table.values())
    params = next(line for line in out.splitlines() if line.split()[:1] == ["params"])
    assert numbers(params)[-1] == held
    whole = numbers(params)[-2]
    optimizer = next(line for line in out.splitlines() if line.split()[:1] == ["optimizer"])
    assert numbers(optimizer)[-2] == 2 * whole + 8  # and two counts of steps
    assert numbers(optimizer)[-1] < 2 * held


def test_what_is_frozen_has_no_gradients(shown):
    out = shown("Train.transforms=(@LoRA(),)", "LoRA.rank=2", "LoRA.paths=('**/mlp/up',)", "Llama.layers=2")
    grads, optimizer = (numbers(re.search(rf"^ *{kind} .*$", out, re.MULTILINE)[0]) for kind in ("grads", "optimizer"))
    assert grads == [4 * 2 * 2 * (32 + 64)] * 2  # of float32, in two layers
    assert optimizer == [2 * grads[0] + 8] * 2


def test_identity_layers_are_said_once_and_their_bytes_counted(shown, tiny):
    out = shown("Llama.layers=126", "Layout.mesh={'pipe': 4}", "Layout.pad_layers=True", "Layout.microbatches=4")
    assert out.count("126 layers") == 1
    assert "126 layers of a kind are stored as 128, with 2 of zeros at the end" in out
    assert re.search(r"layers/block/mlp/up +layers embed mlp +128 × 32 × 64 +pipe – – +262,144", out)


def test_of_a_serving_configuration_each_weights_sharding_the_cache_and_the_engines(tmp_path, capsys):
    model = Llama(vocab=320, embed=32, layers=2, heads=4, kv_heads=2, mlp=64)
    serve = Serve(model, Layout(mesh={"data": 3, "tensor": 2}), weights="int8", capacity=Capacity(4, 16, 64))
    (tmp_path / "serve.gin").write_text(dump(serve))
    show_config(tmp_path / "serve.gin", ("Capacity.length=128",), picture=tmp_path / "mesh.png")
    out, program = capsys.readouterr().out, serving_program(replace(serve, capacity=Capacity(4, 16, 128)), SIX)
    assert re.search(r"Capacity\.length = 128 +# --set\n", out)
    assert re.search(r"mlp/gate/values +layers embed mlp +2 × 32 × 64 +– – tensor +2,048", out)
    assert re.search(r"mlp/gate/scales +layers mlp +2 × 64 +– tensor +128", out)
    rows = {line.split()[0]: numbers(line) for line in out.splitlines() if line.split()[:1] in (["weights"], ["cache"])}
    assert rows["weights"][-1] == program.parameter_bytes()
    pages = 1 + 4 * 64 // 16  # 16 tokens each, of all requests at half their length, and that of padding
    assert rows["cache"] == [3 * 2 * pages * 16 * 2 * 2 * 8 * 4, 2 * pages * 16 * 2 * 2 * 8 * 4 // 2]
    assert "3 engines, one for each place along data, which share the requests, on 2 devices each" in out
    assert "up to 4 requests of 128 tokens at once, in steps of 16 tokens" in out
    assert "weights: int8: " in out
    assert (tmp_path / "mesh.png").is_file()


@pytest.mark.full
def test_what_is_on_the_host_is_counted_apart(shown):
    def totals(host):
        lines = shown("Layout.mesh={'data': 4}", "Layout.zero=3", f"Execution.host={host}").splitlines()
        return {line.split()[0]: numbers(line) for line in lines if line.split()[:1] in (["params"], ["optimizer"])}

    (whole, params), (state, optimizer) = totals(())["params"], totals(())["optimizer"]
    assert totals(("optimizer",)) == {"params": [whole, params, 0], "optimizer": [state, 8, optimizer - 8]}
    assert totals(("params", "optimizer"))["params"] == [whole, 0, params]


def test_what_is_on_a_disk_is_counted_apart_and_the_disk_need_not_be_here(shown):
    def totals(disk):
        lines = shown("Layout.mesh={'data': 4}", "Layout.zero=3", f"Execution.disk={disk}").splitlines()
        return {line.split()[0]: numbers(line) for line in lines if line.split()[:1] in (["params"], ["optimizer"])}

    (params, state), other = totals({}).values(), totals({"optimizer": "/nowhere"})
    assert other == {"params": [*params, 0], "optimizer": [state[0], 8, state[1] - 8]}


def test_a_mistyped_role_announces_nothing(shown):
    mesh, row = "Layout.mesh={'tensor': 2}", "('context', 'tensor')"
    assert "sequence parallelism: seq.residual" in shown(mesh, f"Layout.rows={{'seq.residual': {row}}}")
    with pytest.raises(LayoutError, match=r"no axis 'seq\.residul'.* Did you mean 'seq\.residual'\?"):
        shown(mesh, f"Layout.rows={{'seq.residul': {row}}}")


def test_what_is_replicated_is_told(shown):
    assert "replicated on every device: layers/block/attention_norm/scale" in shown("Layout.mesh={'tensor': 4}")
    split = shown("Layout.mesh={'data': 4}", "Layout.zero=3")
    assert "no parameter is replicated on every device" in split


def test_a_layout_that_cannot_hold_the_model_is_refused_as_a_run_would(shown):
    with pytest.raises(
        LayoutError, match=r"axis 'heads' of size 4 is not divisible by 3.*: layers/block/attention/query"
    ):
        shown("Layout.mesh={'tensor': 3}")


def test_each_mesh_axis_is_explained_and_a_steps_collectives_are_listed(shown):
    out = shown("Layout.mesh={'data': 8, 'tensor': 4}", "Layout.zero=3", "Data.batch=16")
    assert re.search(r"data +8 +data parallelism: batch; ZeRO-3: embed of stored parameters, gradients and", out)
    assert re.search(r"tensor +4 +tensor parallelism: heads kv_heads mlp vocab", out)
    assert "traced for cpu, which computes in float32" in out
    assert re.search(r"all-gather +[\d,]+ × +[\d.]+ kB +weights, forward +.*\d+%", out)
    assert re.search(r"data +all +[\d,]+ × +[\d.]+ kB", out)
    assert "not counted" not in out


def test_one_device_sends_nothing_whatever_kernel_its_chip_is_to_have(shown):
    changes = "Layout.mesh={'data': 1}", "Execution.kernels={'attention': 'cudnn'}"
    assert "one device: nothing is sent" in shown(*changes)


def test_of_an_automatic_layout_only_what_the_program_names_is_listed_and_that_is_said(shown):
    out = shown("Layout.mesh={'data': 4, 'tensor': 2}", "Layout.auto=True")
    assert "XLA's partitioner adds collectives that the program does not name" in out
    assert "weights, forward" not in out


def test_a_target_is_traced_in_its_own_dtype_and_must_have_the_meshs_devices(shown):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    assert "traced for tpu, which computes in bfloat16" in shown("Layout.mesh={'data': 8}", on="v5e:2x4")
    with pytest.raises(LayoutError, match=r"asks for data 8 = 8 devices, and there are 16"):
        shown("Layout.mesh={'data': 8}", on="v5e:4x4")


@pytest.mark.parametrize("mesh", [{"data": 4, "tensor": 2}, {"replica": 2, "data": 4, "tensor": 4}, {"data": 512}])
def test_the_picture_is_drawn_for_any_mesh(shown, tmp_path, mesh):
    path = tmp_path / "pictures" / "mesh.PNG"
    batch = f"Data.batch={math.prod(mesh.values())}"
    assert f"drawn into {path}" in shown(f"Layout.mesh={mesh}", batch, picture=path)
    with path.open("rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_a_weight_or_a_picture_that_cannot_be_drawn_is_refused(shown, tmp_path):
    with pytest.raises(
        UserError, match=r"no parameter is called 'layers/block/mlp/gat'\. Did you mean 'layers/bl.*gate'"
    ):
        shown(picture=tmp_path / "mesh.png", weight="layers/block/mlp/gat")
    with pytest.raises(UserError, match=r"unsupported image format '\.gif1' of '.*mesh\.gif1'; write FILE\.png"):
        shown(picture=tmp_path / "mesh.gif1")
    with pytest.raises(UserError, match=r"give --draw FILE\.png too"):
        shown(weight="head")
