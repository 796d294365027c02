"""What cannot hold is said before anything is traced: which parameter, axis, sizes, mesh axis, and what to change."""

import pytest

from axon.layout import ArraySpec, Layout, LayoutError, validate
from axon.parallel.pipeline import Interleaved

BATCH = ArraySpec(("batch", "seq"), (16, 32))
QUERY = {"block/query": ArraySpec(("embed", "heads", "head_dim"), (32, 6, 8))}
UP = {"block/up": ArraySpec(("layers", "embed", "mlp"), (2, 32, 64))}


def problems(placement, parameters, batch=BATCH):
    with pytest.raises(LayoutError) as caught:
        validate(placement, parameters, batch)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("mesh", [None, {"data": 8}, {"data": 4, "tensor": 2}, {"replica": 2, "data": 2, "tensor": 2}])
def test_a_layout_that_holds_is_accepted(mesh, placed):
    for stage in range(4):
        validate(placed(mesh, zero=stage), QUERY | UP, BATCH)


def test_an_indivisible_axis_is_said_once_with_path_sizes_and_the_fix(placed):
    (message,) = problems(placed({"tensor": 4}), QUERY | UP)
    assert "parameter block/query: axis 'heads' of size 6 is not divisible by 4" in message
    assert "mesh axis 'tensor' = 4" in message
    assert "Layout.rows = {'heads': None}" in message


def test_an_indivisible_vocabulary_is_told_what_pads_it(placed):
    (message,) = problems(placed({"tensor": 4}), {"embedding": ArraySpec(("vocab", "embed"), (30, 8))})
    assert "that 4 divides (the model's field vocab_multiple pads it)" in message


def test_an_axis_that_only_a_later_kind_splits_is_named_with_that_kind(placed):
    parameters = {"norm": ArraySpec(("embed",), (30,))}
    (message,) = problems(placed({"data": 4}, zero=1), parameters)
    assert (
        "axis 'embed' of size 30 is not divisible by 4, the devices along mesh axis 'data' = 4 (optimizer)" in message
    )
    assert "Layout.optimizer = {'embed': None}" in message
    validate(placed({"data": 4}, zero=1, optimizer={"embed": None}), parameters, BATCH)


def test_all_problems_are_said_together(placed):
    batch = ArraySpec(("batch", "seq"), (6, 32))
    told = problems(placed({"data": 4, "tensor": 2}), {"a": ArraySpec(("vocab", "embed"), (7, 4))}, batch)
    assert len(told) == 2
    assert "parameter a: axis 'vocab'" in told[0]
    assert "the batch: axis 'batch' of size 6 is not divisible by 4" in told[1]


@pytest.mark.parametrize("mesh", [None, {"tensor": 2}])
def test_a_mesh_axis_used_twice_in_one_parameter_is_refused_even_on_one_device(mesh, placed):
    (message,) = problems(placed(mesh, rows={"head_dim": "tensor"}), QUERY)
    assert message.startswith("parameter block/query: it would be split twice over mesh axis 'tensor': by 'heads'")
    assert "and by 'head_dim'" in message
    assert "Layout.rows = {'head_dim': None}" in message


def test_an_axis_without_a_row_is_refused_with_the_nearest_name(placed):
    (message,) = problems(placed(), {"a/b": ArraySpec(("embed", "mpl"), (4, 4))})
    assert message.startswith("parameter a/b: axis 'mpl' is not in the layout's table. Did you mean 'mlp'?")


NO_STAGES = [
    ({"mesh": {"data": 2}, "rows": {"layers": "data"}}, "mesh axis 'data' = 2 would split 'layers'"),
    ({"mesh": {"pipe": 2}, "auto": True}, "mesh axis 'pipe' = 2 would split 'layers'"),
    ({"mesh": {"pipe": 4}}, "2 of a kind of layers do not divide into 4 stages"),
    (
        {"mesh": {"pipe": 2}, "schedule": Interleaved(2)},
        "2 of a kind of layers do not divide into 2 stages of 2 chunks",
    ),
]


@pytest.mark.parametrize(("options", "message"), NO_STAGES, ids=[message for _, message in NO_STAGES])
def test_layers_that_do_not_divide_into_stages_are_refused(options, message, placed):
    assert problems(placed(**options), UP)[0].startswith(f"parameter block/up: {message}")


def test_layers_that_do_not_divide_could_be_padded_or_divided_otherwise(placed):
    deep = {"block/up": ArraySpec(("layers", "embed", "mlp"), (126, 32, 64))}
    (message,) = problems(placed({"pipe": 4}), deep)
    assert "Layout.pad_layers = True adds 2 identity layers, 1.6% of the blocks' time" in message
    assert "a number of layers that 4 divides, or a mesh axis 'pipe' of 3 or 6" in message


def test_layers_divide_into_stages(placed):
    validate(placed({"pipe": 2}), UP, BATCH)
    validate(placed({"pipe": 2}, schedule=Interleaved(1)), UP, BATCH)


def test_microbatches_divide_the_rows_of_each_device(placed):
    validate(placed({"data": 4}, microbatches=4), UP, BATCH)
    (message,) = problems(placed({"data": 4}, microbatches=8), UP)
    assert "the batch: 16 sequences are not divisible by 32, which is Layout.microbatches = 8 × 4 devices" in message


def test_the_stream_between_blocks_has_to_be_divisible_too(placed):
    residual = ArraySpec(("batch", "seq.residual", "embed"), (16, 30, 32))
    placement = placed({"tensor": 4}, rows={"seq.residual": "tensor"})
    with pytest.raises(LayoutError) as caught:
        validate(placement, UP, BATCH, {"the residual stream": residual})
    (message,) = str(caught.value).splitlines()
    assert "the residual stream: axis 'seq.residual' of size 30 is not divisible by 4" in message
    assert "Layout.rows = {'seq.residual': None}" in message
    validate(placement, UP, BATCH, {"the residual stream": ArraySpec(residual.axes, (16, 32, 32))})


def test_a_stream_that_one_mesh_axis_would_split_twice_is_refused(placed):
    residual = ArraySpec(("batch", "seq.residual", "embed"), (16, 32, 32))
    placement = placed({"tensor": 2}, rows={"seq.residual": "tensor", "embed": "tensor"}, params={"embed": None})
    with pytest.raises(LayoutError, match=r"split twice over mesh axis 'tensor': by 'seq\.residual' and by 'embed'"):
        validate(placement, UP, BATCH, {"the residual stream": residual})


@pytest.mark.parametrize(
    ("mesh", "context", "seq", "expected"),
    [
        ({"data": 2}, "ring", 32, "'ring' has no effect: no mesh axis of 2 or more splits 'seq'"),
        ({"context": 2}, "usp", 32, "Write both, as in Layout.mesh = {'context': 2, 'ulysses': 2}"),
        ({"ulysses": 2}, "usp", 32, "Write both, as in Layout.mesh = {'context': 2, 'ulysses': 2}"),
        ({"context": 4}, "ring", 36, "in 8 chunks, and 36 positions do not divide"),
        ({"context": 4}, "ulysses", 32, "block/query: 6 heads are not divisible by 4, and Layout.context = 'ulysses'"),
        ({"context": 4}, {"block": "ulysses"}, 32, "and Layout.context['block'] = 'ulysses' exchanges positions"),
        ({"context": 4}, {"block": "gather", "last": "ring"}, 36, "in 8 chunks, and 36 positions do not divide"),
        ({"data": 2}, {"block": "ring"}, 32, "Layout.context['block'] = 'ring' has no effect: no mesh axis"),
    ],
)
def test_a_way_to_see_whole_sequences_that_does_not_fit_is_refused(mesh, context, seq, expected, placed):
    (message,) = problems(placed(mesh, context=context), QUERY, ArraySpec(("batch", "seq"), (16, seq)))
    assert expected in message


def test_two_claims_on_one_mesh_axis_in_attention_are_refused(placed):
    layout = {"rows": {"seq": ("context", "tensor")}, "context": "ring"}
    (message,) = problems(placed({"context": 2, "tensor": 2}, **layout), QUERY, ArraySpec(("batch", "seq"), (16, 32)))
    assert "split twice over mesh axis 'tensor': by 'seq.attention' and by 'heads.attention'" in message


@pytest.mark.parametrize(
    ("mesh", "context"),
    [
        ({"context": 4}, "ring"),
        ({"context": 2}, "ulysses"),
        ({"context": 2, "ulysses": 2}, "usp"),
        ({"context": 2, "ulysses": 2}, "ring"),
        ({"context": 4}, "gather"),
        ({"context": 2, "ulysses": 2}, {"block": "usp", "last": "ring"}),
        ({"context": 2}, {"block": "ulysses"}),
    ],
)
def test_a_way_to_see_whole_sequences_that_fits_is_accepted(mesh, context, placed):
    validate(placed(mesh, context=context), QUERY, BATCH)


@pytest.mark.parametrize("context", ["ulyses", {"local": "ring", "full": "ulyses"}], ids=["all", "by kind of block"])
def test_an_unknown_way_to_see_whole_sequences_is_refused_with_the_nearest_name(context):
    with pytest.raises(LayoutError, match=r"unknown method 'ulyses'\. Did you mean 'ulysses'"):
        Layout({"context": 2}, context=context)


def test_methods_by_kind_of_block_without_a_kind_are_refused():
    with pytest.raises(LayoutError, match=r"Layout\.context = \{\} names no kind of block"):
        Layout({"context": 2}, context={})
