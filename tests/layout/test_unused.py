"""Rows and mesh axes that would have no effect on a model are refused; what a model uses it is asked only in doubt."""

import pytest

from axon.layout import ArraySpec, LayoutError, validate

BATCH = ArraySpec(("batch", "seq"), (16, 32))
STREAM = ArraySpec(("batch", "seq.residual", "embed"), (16, 32, 32))
UP = {"block/up": ArraySpec(("layers", "embed", "mlp"), (2, 32, 64))}
ROLE = {"order": ("data", "tensor", "mine"), "rows": {"mlp.inner": "mine"}}


def check(placement, *used, parameters=UP):
    """Validated for a model that names the axes `used` besides those of its parameters."""
    validate(placement, parameters, BATCH, {"the residual stream": STREAM}, lambda: used)


def problems(placement, *used):
    with pytest.raises(LayoutError) as caught:
        check(placement, *used)
    return str(caught.value).splitlines()


def test_a_mistyped_role_is_refused_with_the_nearest_name(placed):
    placement = placed({"data": 2, "tensor": 2}, rows={"seq.residul": ("context", "tensor")})
    (message,) = problems(placement, "seq.residual", "mlp")
    assert message == (
        "Layout.rows: this model has no axis 'seq.residul', so its row has no effect. Did you mean 'seq.residual'?"
    )


@pytest.mark.parametrize("where", ["rows", "params", "optimizer"])
def test_a_row_for_an_axis_that_is_not_there_is_refused(where, placed):
    for name, hint in (("mpl", "Did you mean 'mlp'?"), ("state_space", "Known: "), ("mlp.state", "Known: ")):
        (message,) = problems(placed({"data": 4}, **{where: {name: None}}), "mlp", "seq.residual")
        assert message.startswith(f"Layout.{where}: ")
        assert f"has no axis '{name}'" in message or f"no parameter has an axis '{name}'" in message
        assert hint in message


def test_a_row_of_ones_own_is_taken_where_the_model_names_its_axis(placed):
    check(placed({"data": 4}, rows={"state": None}), "state")
    check(placed({"data": 4}, rows={"state": None}), "state.inner")
    check(placed({"data": 4}, rows={"mlp.inner": None}), "mlp.inner")
    (message,) = problems(placed({"data": 4}, params={"mlp.inner": None}), "mlp.inner")
    assert "no parameter has an axis 'mlp.inner'" in message
    expert = {"up": ArraySpec(("embed", "mlp.expert"), (32, 64))}
    check(placed({"data": 4}, params={"mlp.expert": None}), parameters=expert)


def test_rows_of_the_default_table_may_be_for_another_model(placed):
    check(placed({"data": 4}, rows={"experts": None, "heads": "tensor"}, params={"head_dim": None}))


def test_a_mesh_axis_that_splits_nothing_is_refused(placed):
    (message,) = problems(placed({"data": 2, "expert": 2}, rows={"batch": "data"}))
    assert "mesh axis 'expert' = 2 is not used: its rows are for 'experts', which this model does not use" in message
    assert "Layout.rows = {'batch': ('data', 'expert')}" in message
    (message,) = problems(placed({"data": 2, "mine": 2}, order=("data", "mine")))
    assert "mesh axis 'mine' = 2 is not used: no row names it" in message
    (message,) = problems(placed({"data": 2, "mine": 2}, order=("data", "mine"), params={"seq": "mine"}))
    assert "mesh axis 'mine' = 2 is not used" in message, "no parameter has positions"


def test_a_mesh_axis_that_splits_only_an_activation_is_used(placed):
    check(placed({"data": 2, "tensor": 2}, rows={"mlp": None, "seq.residual": ("context", "tensor")}))
    check(placed({"data": 2, "mine": 2}, **ROLE), "mlp.inner")
    told = problems(placed({"data": 2, "mine": 2}, **ROLE), "mlp")
    assert "no axis 'mlp.inner'" in told[0]
    assert "mesh axis 'mine' = 2 is not used: its rows are for 'mlp.inner', which this model does not use" in told[1]


def test_a_model_is_traced_only_where_its_parameters_leave_a_doubt(placed):
    def never():
        raise AssertionError

    for layout in ({}, {"zero": 3}, {"rows": {"seq.residual": ("context", "tensor"), "experts": None}}):
        validate(placed({"data": 2, "tensor": 2}, **layout), UP, BATCH, {"the residual stream": STREAM}, never)
