"""What each mesh axis is said to be for."""

from axon.layout import Layout, Placement, roles

USED = {"batch", "seq", "seq.residual", "vocab", "embed", "layers", "mlp", "heads", "head_dim"}


def said(mesh, *more, **layout):
    return roles(Placement.described(Layout(mesh, **layout), 1), {*USED, *more})


def test_each_stage_of_zero_has_its_name_and_what_it_cuts():
    assert said({"data": 8}) == {"data": ["data parallelism: batch"]}
    for stage, kinds in (
        (1, "embed of optimizer state"),
        (2, "embed of gradients and optimizer state"),
        (3, "embed of stored parameters, gradients and optimizer state"),
    ):
        assert said({"data": 8}, zero=stage)["data"] == ["data parallelism: batch", f"ZeRO-{stage}: {kinds}"]


def test_the_default_table_is_tensor_and_context_parallel_and_names_only_what_the_model_has():
    found = said({"data": 2, "context": 2, "tensor": 2})
    assert found["tensor"] == ["tensor parallelism: heads mlp vocab"]
    assert found["context"] == ["context parallelism: seq"]


def test_an_exchange_of_positions_for_heads_is_context_parallelism():
    found = said({"context": 2, "tensor": 2}, "seq.attention", "heads.attention", context="ulysses")
    assert found["context"] == ["context parallelism: heads.attention seq"]
    assert found["tensor"] == ["tensor parallelism: heads mlp vocab"]


def test_a_pipelines_stages_have_layers_and_share_what_is_not_on_a_stage():
    found = said({"pipe": 4, "tensor": 2})
    assert found["pipe"] == ["pipeline: layers", "embedding and head, shared by all stages: vocab"]


def test_the_residual_streams_own_row_is_sequence_parallelism():
    found = said({"data": 4, "tensor": 2}, rows={"seq.residual": ("context", "tensor")})
    assert "sequence parallelism: seq.residual" in found["tensor"]


def test_no_parallelism_is_announced_for_axes_that_the_model_does_not_name():
    rows = {"seq.residul": ("context", "tensor"), "kv_seq": "context"}
    found = said({"context": 2, "tensor": 2}, rows=rows)
    assert found == {"context": ["context parallelism: seq"], "tensor": ["tensor parallelism: heads mlp vocab"]}


def test_experts_are_expert_parallelism_though_only_parameters_are_split():
    found = said({"data": 2, "expert": 2}, "experts", "mlp.expert")
    assert found["expert"] == ["data parallelism: batch", "expert parallelism: experts"]
    zero = said({"data": 2, "expert": 2}, "experts", "embed.expert", zero=3)
    assert zero["expert"] == found["expert"]
    assert zero["data"][1].startswith("ZeRO-3: embed of")


def test_replicas_around_zero_are_hybrid():
    assert said({"replica": 2, "data": 4}, zero=3)["replica"][-1] == "copies of what data cut (HSDP)"
    assert len(said({"replica": 2, "data": 4})["replica"]) == 1


def test_a_mesh_axis_of_ones_own_is_told_by_the_axes_it_cuts_and_one_that_cuts_none_as_nothing():
    order = ("data", "mine", "tensor")
    layout = {"rows": {"state": "mine"}, "order": order}
    assert said({"data": 2, "mine": 2}, "state", **layout)["mine"] == ["also splits: state"]
    assert said({"data": 2, "mine": 2}, "state.inner", **layout)["mine"] == ["also splits: state"]
    assert said({"data": 2, "mine": 2}, **layout)["mine"] == ["nothing"]
    assert said({"data": 2, "expert": 2}, rows={"batch": "data"})["expert"] == ["nothing"]
