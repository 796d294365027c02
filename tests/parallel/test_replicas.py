"""What crosses the link between replicas, read from compiled programs, and layouts that cannot hold replicas."""

import math
import re

import jax
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout, LayoutError
from axon.parallel.onebit import chunk_size
from axon.parallel.outer import DiLoCo, SlowMo
from axon.train.optimizers import AdamW, Constant, OneBitAdam
from axon.train.step import Program as program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=1, heads=4, kv_heads=4, mlp=48)
MESH = {"replica": 2, "data": 2, "tensor": 2}
ADAM, ONE_BIT = AdamW(Constant(1e-3)), OneBitAdam(Constant(1e-3), warmup=2)
SIZES = {"f32": 4, "s32": 4, "u8": 1, "pred": 1}

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")


def groups_of(line):
    """The groups of devices that a collective of a program on `MESH` joins."""
    devices = np.arange(8).reshape(tuple(MESH.values()))
    if found := re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line):
        joined = [list(MESH).index(name) for name in re.findall(r"'(\w+)'", found[1])]
        rest = [i for i in range(3) if i not in joined]
        return devices.transpose(rest + joined).reshape(-1, math.prod(devices.shape[i] for i in joined))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = (tuple(map(int, part.split(","))) if part else None for part in found.groups())
        return np.arange(8).reshape(dims).transpose(order).reshape(shape)
    found = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    assert found, line
    return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]


def crossing(compiled):
    """(where, kind, arrays) of each collective that crosses `replica`; where is "step" or a branch's number."""
    bodies, name = {}, ""
    for line in compiled.as_text().splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = header[1]
        bodies.setdefault(name, []).append(line)
    text = {name: "\n".join(lines) for name, lines in bodies.items()}
    conditional = re.search(r"branch_computations=\{(.*?)\}", compiled.as_text())
    if conditional:
        branches = re.findall(r"[\w.-]+", conditional[1])
    else:
        branches = [re.search(rf"{side}_computation=%?([\w.-]+)", compiled.as_text())[1] for side in ("false", "true")]
    where = {}
    for number, branch in enumerate(branches):
        reached = [branch]
        for one in reached:
            reached += [n for n in re.findall(r"%([\w.-]+)", text[one]) if n in text and n not in reached]
        where |= dict.fromkeys(reached, number)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            made = COLLECTIVE.search(line)
            if made and any(len({device // 4 for device in group}) > 1 for group in groups_of(line)):
                arrays = [(d, tuple(int(n) for n in s.split(",") if n)) for d, s in ARRAY.findall(made[1])]
                found.append((where.get(name, "step"), made[2], arrays))
    return found


def bytes_of(arrays):
    return sum(SIZES[dtype] * math.prod(shape) for dtype, shape in arrays)


def made(optimizer=ADAM, mesh=MESH, **options):
    layout = {name: options.pop(name) for name in ("zero", "rows") if name in options}
    devices = jax.devices()[: math.prod(mesh.values())]
    return program(MODEL, Layout(mesh, **layout), optimizer, batch=8, seq=16, devices=devices, **options)


def held(program):
    """Numbers of each parameter that a device holds."""
    return [
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(program.abstract_state().parameters)
    ]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_only_scalars_cross_replicas_in_an_inner_step_and_the_parameters_in_an_outer_one(zero):
    diloco = made(outer=DiLoCo(2), zero=zero)
    found = crossing(diloco.lower().compile())
    inner, outer = ([f for f in found if (f[0] == 1) is is_outer] for is_outer in (False, True))
    metrics = [shape for _, _, arrays in inner for _, shape in arrays]
    assert metrics
    assert all(shape in ((), (len(diloco.parameters),)) for shape in metrics), inner
    assert sum(bytes_of(arrays) for _, _, arrays in outer) == 4 * sum(held(diloco))


def message_bytes(counts, workers):
    """Bytes of one device's message for one chunk of each of the arrays with so many numbers: signs, and a scale.

    A step moves `2·(workers − 1)` of them in and out of each device, half before the average and half after it.
    """
    return sum(chunk_size(count, workers) // 8 + 4 for count in counts)


@pytest.mark.full
def test_one_bit_adam_moves_a_bit_a_number_both_ways_after_its_warm_up():
    onebit = made(ONE_BIT)
    found = crossing(onebit.lower().compile())
    exchanged = [(kind, arrays) for where, kind, arrays in found if where == 0 and arrays[0][0] == "u8"]
    others = [shape for where, _, arrays in found if where != 1 for dtype, shape in arrays if dtype != "u8"]
    counts, workers = held(onebit), MESH["replica"]
    assert {kind for kind, _ in exchanged} == {"all-to-all", "all-gather"}
    for _, arrays in exchanged:
        assert bytes_of(arrays) == workers * message_bytes(counts, workers)
    assert all(math.prod(shape) <= len(counts) for shape in others), "besides, only norms and other scalars"
    warm = sum(bytes_of(arrays) for where, _, arrays in found if where == 1)
    assert warm >= 4 * sum(counts), "in the warm-up the whole gradient crosses"


def test_a_message_is_a_thirty_second_of_an_all_reduce():
    numbers, workers = [10_000_000, 4096], 4
    ours, theirs = (
        2 * (workers - 1) * message_bytes(numbers, workers),
        2 * (workers - 1) / workers * 4 * sum(numbers),
    )
    assert ours / theirs == pytest.approx(1 / 32, rel=1e-4)


@pytest.mark.parametrize("options", [{"outer": DiLoCo(2)}, {"outer": SlowMo(2)}, {"optimizer": ONE_BIT}])
def test_a_mesh_without_replicas_is_refused(options):
    with pytest.raises(LayoutError, match=r"no mesh axis 'replica' of 2 or more\. Give it one, as in Layout\.mesh"):
        made(**options, mesh={"data": 4, "tensor": 2})


@pytest.mark.parametrize("stage", [2, 3])
def test_one_bit_adam_with_zero_2_or_3_is_refused(stage):
    with pytest.raises(LayoutError, match=rf"OneBitAdam .* Layout\.zero = {stage} .* Set Layout\.zero to 0 or 1"):
        made(ONE_BIT, zero=stage)


def test_one_bit_adam_with_an_outer_method_is_refused():
    with pytest.raises(UserError, match=r"Train\.outer = DiLoCo and Train\.optimizer = OneBitAdam cannot be combined"):
        made(ONE_BIT, outer=DiLoCo(2))


def test_rows_that_split_more_than_the_batch_over_replicas_are_refused():
    with pytest.raises(LayoutError, match=r"Layout\.rows splits 'mlp' over 'replica'. Take 'replica' out of that row"):
        made(outer=DiLoCo(2), rows={"mlp": ("replica", "tensor")})
    with pytest.raises(LayoutError, match=r"Set Layout\.rows = \{'batch': \('replica', 'data'\)\}"):
        made(outer=DiLoCo(2), rows={"batch": ("data", "replica")})
