"""Parameters as matrices, by their axes."""

from axon.train.optimizers.matrix import as_matrix, axes_of_part, within


def test_inputs_and_outputs_are_those_of_the_contraction(parameters):
    sides = {path: as_matrix(spec) for path, spec in parameters.items()}
    assert (sides["layers/out"].count, sides["layers/out"].inputs, sides["layers/out"].outputs) == ((0,), (1, 2), (3,))
    assert (sides["layers/query"].inputs, sides["layers/query"].outputs) == ((1,), (2, 3))
    assert (sides["layers/expert"].count, sides["layers/expert"].inputs) == ((0, 1), (2,))
    assert sides["layers/scale"] is sides["layers/query_bias"] is None


def test_heads_count_matrices_where_they_are_outputs(parameters):
    assert as_matrix(parameters["layers/query"], ("heads",)).count == (0, 2)
    assert as_matrix(parameters["layers/out"], ("heads",)) == as_matrix(parameters["layers/out"])
    assert as_matrix(parameters["layers/query"], ("heads", "head_dim")) is None


def test_one_layers_and_one_experts_part_has_the_other_dimensions(parameters):
    assert within(parameters["layers/expert"]) == (2, 3)
    assert within(parameters["layers/scale"]) == (1,)


def test_a_part_has_the_axes_of_its_array_where_it_has_its_sizes():
    axes, whole = ("layers", "embed", "mlp"), (3, 8, 20)
    assert axes_of_part(axes, whole, (3, 8, 20)) == axes
    assert axes_of_part(axes, whole, (3, 8, 1)) == ("layers", "embed", "_2")
    assert axes_of_part(axes, whole, (3, 1, 20, 20)) == ("layers", "_1", "mlp", "_3")
    assert axes_of_part(axes, whole, (3, 8)) is axes_of_part(axes, whole, (3, 20, 8)) is None
