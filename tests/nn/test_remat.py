"""What becomes of each activation: kept, computed again or offloaded, with the same gradients."""

import ast
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.config import load
from axon.errors import UserError
from axon.layout import Execution, Layout, Placement
from axon.nn import Auxiliary, Depth, Inputs, Param, Segment
from axon.nn.remat import check_remat, describe, recomputed, remat_of
from axon.plan.compiled import host_bytes, memory_parts
from axon.plan.topology import devices
from axon.train.optimizers import SGD, AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

SIZES: dict[str, Any] = {"vocab": 64, "embed": 16, "heads": 2, "mlp": 32}
MIXED = {"attention": "save", "gate": "offload", "input": "offload"}
SHARDED = Layout({"data": 2, "tensor": 2}, zero=3)
NAMES = {"local": ("gate", "up"), "full": ("gate", "up", "query")}


@pytest.mark.parametrize(
    ("remat", "of_local", "of_full"),
    [
        ("full", "full", "full"),
        (("gate",), ("gate",), ("gate",)),
        ({"gate": "offload"}, {"gate": "offload"}, {"gate": "offload"}),
        ({"full": "minimal"}, "none", "minimal"),
        ({"local": {"input": "offload"}, "full": ("query",)}, {"input": "offload"}, ("query",)),
    ],
)
def test_a_policy_is_of_all_kinds_or_by_kind(remat, of_local, of_full, executed):
    check_remat(remat, NAMES)
    with executed(remat=remat):
        assert (remat_of("local"), remat_of("full")) == (of_local, of_full)


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (("uq",), "no activation is named 'uq'. Known: gate, query, up."),
        ({"gaet": "offload"}, "no activation is named 'gaet'. Did you mean 'gate'?"),
        ({"inptu": "offload"}, "no activation is named 'inptu'. Did you mean 'input'?"),
        ({"local": {"query": "save"}}, "no activation is named 'query'. Known: gate, input, up."),
        ({"lokal": "full"}, "no kind of block or activation is named 'lokal'. Did you mean 'local'?"),
    ],
)
def test_what_matches_nothing_is_refused(remat, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_remat(remat, NAMES)


def test_a_policy_is_said_in_words():
    assert describe({"gate": "offload", "attention": "save", "input": "offload", "up": "recompute"}) == (
        "save attention, recompute up, offload gate + input"
    )


def program(model, execution, layout=None):
    layout = layout or Layout({"data": 1})
    count = int(np.prod(list(layout.mesh.values())))
    options = {"execution": execution, "devices": jax.devices()[:count]}
    return Program(model, layout, SGD(Constant(1e-2)), batch=4, seq=16, **options)


def stepped(rng, packed_batch, model, unroll, layout=None):
    """A step's metrics, the parameters after it, and what was chosen."""
    seed = int(rng.integers(2**31))

    def run(remat):
        made = program(model, Execution(remat=remat, unroll=unroll), layout)
        batch = packed_batch(np.random.default_rng(seed), 4, 16, 64)
        state, metrics = made.step(made.init(), made.place(batch))
        return jax.device_get((state.parameters, metrics)), made.choices

    return run


@pytest.mark.full
@pytest.mark.some(unroll=(False,), layout=(SHARDED,))
@pytest.mark.parametrize(
    ("unroll", "layout"),
    [
        (False, None),
        (True, None),
        (False, SHARDED),
        (None, Layout({"pipe": 2}, microbatches=2)),
    ],
    ids=["scanned", "unrolled", "scanned, sharded", "pipelined"],
)
def test_offloaded_activations_give_the_same_step(unroll, layout, rng, packed_batch):
    run = stepped(rng, packed_batch, Llama(**SIZES, layers=2, kv_heads=2), unroll, layout)
    (found, choices), (expected, _) = run(MIXED), run("none")
    assert choices["offload"] == "gate, input of each layer to pinned_host"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("none", set()),
        ("minimal", set()),
        ("full", {"up", "gate"}),
        (("up",), {"gate"}),
        ({"up": "save", "gate": "recompute"}, {"gate"}),
        ({"up": "recompute", "gate": "save"}, {"up"}),
    ],
)
def test_a_module_is_told_which_of_its_activations_the_backward_makes_again(
    remat, again, bind, random_parameters, rng, executed
):
    told = set()

    class Asks(nnx.Module):
        remat_names = ("gate", "up")

        def __init__(self):
            self.scale = Param("embed", {"embed": 4})

        def __call__(self, x, inputs, cache=None):
            told.update(name for name in self.remat_names if recomputed(name))
            return x * self.scale.get_value(), cache, Auxiliary()

    depth = Depth(Segment(2, block=Asks()))
    ids = jnp.zeros((1, 3), jnp.int32)
    with executed(remat=remat):
        bind(depth, random_parameters(depth, rng))(jnp.ones((1, 3, 4)), Inputs(ids, ids))
    assert told == again
    assert not recomputed("up")


@pytest.mark.parametrize(
    ("remat", "barriers"), [("none", 0), ("minimal", 0), (("up",), 1), (("gate",), 1), ("full", 2)]
)
def test_of_an_mlp_on_tpus_what_the_backward_makes_again_is_no_product_to_xla(
    remat, barriers, monkeypatch, bind, random_parameters, rng, executed
):
    model = Llama(**SIZES, layers=1, kv_heads=2).build()
    values, ids = random_parameters(model, rng), jnp.zeros((1, 4), jnp.int32)

    def count():
        with executed(remat=remat):
            traced = jax.make_jaxpr(lambda v: bind(model, v).hidden(Inputs(ids, jnp.arange(4)[None]))[0])(values)
        return str(traced).count("optimization_barrier")

    assert count() == 0
    monkeypatch.setattr("axon.nn.mlp.platform", lambda: "tpu")
    assert count() == barriers


def test_a_platform_without_the_hosts_memory_is_refused(monkeypatch):
    monkeypatch.setattr(Placement, "memories", frozenset({"device"}))
    made = program(Llama(**SIZES, layers=2, kv_heads=2), Execution(remat=MIXED))
    with pytest.raises(UserError, match=r"'gate', 'input' cannot be offloaded.*\(cpu\) have no memory 'pinned_host'"):
        made.trace()


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("llama3_8b", "Execution.remat={'attention': 'save', 'input': 'offload'}"),
        ("gemma3_1b", "Execution.remat={'local': {'input': 'offload'}, 'full': 'minimal', 'last': ('gate',)}"),
    ],
)
def test_a_config_file_can_say_it(name, written):
    remat = load(Path(__file__).parents[2] / "configs" / f"{name}.gin", [written]).tree.execution.remat
    assert remat == ast.literal_eval(written.split("=", 1)[1])


@pytest.mark.slow
def test_a_compiled_step_has_offloaded_activations_in_the_hosts_memory():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    sizes: Any = {"vocab": 512, "embed": 256, "layers": 8, "heads": 2, "kv_heads": 2, "mlp": 8192}  # too large for VMEM
    device, host = {}, {}
    for action in ("save", "offload"):
        execution, layout = Execution(remat={"gate": action, "up": action}), Layout({"data": 8}, zero=3)
        options = {"execution": execution, "devices": devices("v5e:2x4")}
        made = Program(Llama(**sizes), layout, AdamW(Constant(1e-2)), batch=16, seq=512, **options)
        compiled = made.lower().compile()
        device[action], host[action] = memory_parts(compiled)["temporaries"], host_bytes(compiled)
    kept = 2 * 8 * (16 // 8 * 512) * 8192 * 2  # two activations of each layer, in bfloat16
    assert device["save"] - device["offload"] > 0.6 * kept
    assert (host["save"], host["offload"]) == (0, pytest.approx(kept, rel=0.05))


@pytest.mark.full
def test_what_is_kept_of_a_layer_lies_in_a_tpus_memory_as_kernels_and_products_read_it():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    sizes: Any = {"vocab": 512, "embed": 512, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 1536}
    layout = Layout({"data": 4}, zero=3)
    options = {"execution": Execution(remat=("query", "residual")), "devices": devices("v5e:2x2")}
    made = Program(Llama(**sizes), layout, AdamW(Constant(1e-2)), batch=8, seq=1024, **options)
    text = made.lower().compile().as_text()
    orders = {
        shape: set(re.findall(rf"bf16\[{shape}\]{{([\d,]+)", text)) for shape in ("3,2,1024,512", "3,2,1024,4,128")
    }
    assert orders == {"3,2,1024,512": {"3,2,1,0"}, "3,2,1024,4,128": {"4,2,3,1,0"}}
