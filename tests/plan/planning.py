"""Small models to plan for."""

from axon.layout import Layout, Placement
from axon.nn.router import Routing
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama
from models.mixtral import Mixtral

SIZES = {"vocab": 512, "embed": 64, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 128, "head_dim": 32}


PARTS = ("precision", "transforms", "execution")


def program(
    layout=Layout(mesh={"data": 1}),
    devices=1,
    batch=32,
    seq=128,
    platform="tpu",
    family=Llama,
    optimizer=AdamW(Constant(1e-3)),
    **others,
):
    """Of a small model, on devices that are only described; `others`: sizes of the model, and parts of the program."""
    parts = {name: others.pop(name) for name in PARTS if name in others}
    placement = Placement.described(layout, devices, platform)
    model = family(**{**SIZES, **others})
    return Program(model, layout, optimizer, batch=batch, seq=seq, placement=placement, **parts)


def mixture(**more):
    """The same with experts."""
    return program(family=Mixtral, routing=Routing(experts=4, top_k=2), **more)
