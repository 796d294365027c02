"""The table: defaults, a person's rows over them, ZeRO as rows of each kind."""

import itertools

import pytest
from jax.sharding import PartitionSpec

from axon.layout import KINDS, Layout, LayoutError, tensor_3d, zero
from axon.layout.table import DEFAULT_ROWS, DEFAULT_STORED_ROWS


def test_without_rows_every_kind_has_the_default_table():
    for kind in KINDS:
        stored = {} if kind == "activations" else DEFAULT_STORED_ROWS
        assert Layout().table(kind) == DEFAULT_ROWS | stored


def test_experts_are_split_where_they_are_stored_and_a_routers_scores_are_not(placed):
    placement = placed({"expert": 4})
    assert placement.spec(("batch", "seq", "experts")) == PartitionSpec("expert", None, None)
    assert placement.spec(("experts", "embed.expert", "mlp.expert"), "params")[0] == "expert"
    for row, split in ((None, ()), ("data", ("data",))):
        for kind in KINDS:
            assert Layout(rows={"experts": row}).table(kind)["experts"] == split


@pytest.mark.parametrize("row", ["tensor", ("tensor",), ["tensor"]])
def test_a_row_is_a_name_or_several(row):
    assert Layout(rows={"embed": row}).table("activations")["embed"] == ("tensor",)


def test_a_persons_row_replaces_the_default_and_none_deletes_it():
    table = Layout(rows={"batch": "data", "mlp": None}).table("optimizer")
    assert table["batch"] == ("data",)
    assert table["mlp"] == ()
    assert table["heads"] == DEFAULT_ROWS["heads"]


@pytest.mark.parametrize(("own", "kinds"), [("rows", KINDS), ("params", KINDS[1:]), ("grads", KINDS[2:])])
def test_each_kind_starts_from_the_one_before_it(own, kinds):
    layout = Layout(**{own: {"embed": "context"}})
    for kind in KINDS:
        assert layout.table(kind)["embed"] == (("context",) if kind in kinds else ())


def test_a_later_kind_can_delete_what_an_earlier_one_said():
    layout = Layout(rows={"embed": "context"}, optimizer={"embed": None})
    assert layout.table("grads")["embed"] == ("context",)
    assert layout.table("optimizer")["embed"] == ()


@pytest.mark.parametrize(("stage", "split"), [(0, ()), (1, KINDS[3:]), (2, KINDS[2:]), (3, KINDS[1:])])
def test_zero_splits_embed_over_data_from_its_kind_on(stage, split):
    for kind in KINDS:
        assert Layout(zero=stage).table(kind)["embed"] == (("data",) if kind in split else ())
    assert ("data",) in [row for rows in zero(stage).values() for row in rows.values()] or stage == 0


def test_zero_adds_to_a_roles_own_row_unless_that_is_none():
    for own in ("rows", "params"):
        table = Layout(zero=3, **{own: {"embed.expert": "tensor"}}).table
        assert table("params")["embed.expert"] == table("optimizer")["embed.expert"] == ("tensor", "data")
        assert table("activations").get("embed.expert", ()) == (("tensor",) if own == "rows" else ())
        table = Layout(zero=3, **{own: {"embed.expert": None}}).table
        assert table("params")["embed.expert"] == table("optimizer")["embed.expert"] == ()
        assert table("optimizer")["embed"] == ("data",)


def test_zero_adds_to_a_persons_row_of_any_kind():
    for own in ("rows", "params"):
        assert Layout(zero=3, **{own: {"embed": "tensor"}}).table("params")["embed"] == ("tensor", "data")
        assert Layout(zero=3, **{own: {"embed": ("data", "tensor")}}).table("params")["embed"] == ("data", "tensor")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_row_of_none_keeps_zero_out_of_its_own_kind_only(kind):
    layout = Layout(zero=3, **{kind: {"embed": None}})
    for other in KINDS[1:]:
        assert layout.table(other)["embed"] == (() if other == kind else ("data",))


def drawn(rng):
    """A layout's rows of `embed`, at random: no row, None, or some mesh axes."""
    axes = ("data", "context", "tensor")
    rows = [{}, {"embed": None}, {"embed": tuple(rng.permutation(axes)[: rng.integers(1, 4)])}]
    return {own: rows[rng.integers(3)] for own in ("rows", *KINDS[1:])}


def test_a_higher_stage_of_zero_splits_no_kind_less_whatever_the_rows(rng):
    for _ in range(50):
        rows = drawn(rng)
        for kind in KINDS:
            split = [set(Layout(zero=stage, **rows).table(kind)["embed"]) for stage in range(4)]
            assert split == sorted(split, key=len), (rows, kind)
            assert all(less <= more for less, more in itertools.pairwise(split)), (rows, kind)


@pytest.mark.parametrize("stage", range(4))
def test_zero_composes_with_three_dimensional_tensor_parallelism(stage):
    layout = Layout({"data": 2, "z": 2, "x": 2, "y": 2}, zero=stage, **tensor_3d())
    for kind in KINDS[1:]:
        assert layout.table(kind)["embed"] == ("x", "z", *(("data",) if kind in KINDS[4 - stage :] else ()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": {"dta": 1}}, "Layout.mesh: unknown mesh axis 'dta'. Did you mean 'data'?"),
        ({"mesh": {"data": 0}}, "'data' is 0; must be at least 1, or -1"),
        ({"mesh": {"data": -2}}, "'data' is -2; must be at least 1, or -1"),
        ({"mesh": {"data": -1, "tensor": -1}}, "only one mesh axis can be -1"),
        ({"zero": 4}, "Layout.zero is 4; must be 0 (none), 1, 2 or 3"),
        ({"microbatches": 0}, "Layout.microbatches is 0; must be at least 1"),
        ({"overlap": ("tensor",)}, "Layout.overlap: 'tensor' is not among the mesh axes of Layout.mesh, data"),
        ({"mesh": {"tensor": 2}, "overlap": ("tensor", "tensor")}, "Layout.overlap has 'tensor' more than once"),
        ({"order": ("data", "tensor", "data")}, "Layout.order has 'data' more than once: name each once"),
        ({"rows": {"batch": ("data", "data")}}, "Layout.rows: 'batch' is mapped to mesh axis 'data' more than once"),
        (
            {"mesh": {"tensor": 2}, "auto": True, "overlap": ("tensor",)},
            "Set Layout.auto to False, or Layout.overlap to ()",
        ),
        (
            {"rows": {"embed": "tensr"}},
            "Layout.rows: 'embed' is mapped to unknown mesh axis 'tensr'. Did you mean 'tensor'?",
        ),
        ({"params": {"embed": ("data", "x")}}, "Layout.params: 'embed' is mapped to unknown mesh axis 'x'. Known: "),
        ({"grads": {"sek.residual": "data"}}, "Layout.grads: 'sek.residual' is a role of unknown axis 'sek'. Did you"),
    ],
)
def test_a_mistake_in_a_layout_is_said_when_it_is_written(fields, message):
    with pytest.raises(LayoutError) as caught:
        Layout(**fields)
    assert message in str(caught.value)


def test_a_mesh_axis_of_ones_own_has_its_place_in_the_order():
    layout = Layout(mesh={"mine": 2, "data": 4}, rows={"embed": "mine"}, order=("data", "mine"))
    assert layout.table("activations")["embed"] == ("mine",)


def test_rows_of_a_models_own_axes_go_with_it_under_those_of_another_layout():
    run = Layout(
        rows={"low": ("x", "tensor"), "state": None, "embed": "tensor"},
        params={"state": "data"},
        order=("data", "tensor", "x"),
    )
    served = Layout(rows={"state": "tensor"}, mesh={"tensor": 2}).with_axes_of(run)
    assert served.rows == {"low": ("tensor",), "state": "tensor"}
    assert served.params == {"state": ("data",)}
    assert served.with_axes_of(run) == served
