"""Parameters: one declaration; values that depend on the seed and the path only."""

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes.patterns import PatternError
from axon.errors import UserError
from axon.nn import Depth, Param, ParamSpec, Segment, constant, fan_in, initialise, normal, parameters
from axon.nn.stored_layers import pad_layers

DIMS = {"embed": 24, "mlp": 40, "heads": 8, "head_dim": 6}


class Block(nnx.Module):
    def __init__(self):
        self.up = Param("embed mlp", DIMS)
        self.scale = Param("embed", DIMS, constant(1.0))


class Model(nnx.Module):
    def __init__(self, layers=4):
        self.head = Param("heads head_dim embed", DIMS, normal(0.02))
        self.layers = Depth(Segment(layers, block=Block()))


def flat(values):
    return {"/".join(map(str, path)): np.asarray(v) for path, v in nnx.traversals.flatten_mapping(values).items()}


def test_parameters_lists_paths_axes_and_shapes_before_anything_is_made():
    listed = parameters(Model())
    assert listed == {
        "head": ParamSpec(("heads", "head_dim", "embed"), (8, 6, 24), jnp.float32, "params", 0, ("heads",), True),
        "layers/block/scale": ParamSpec(("layers", "embed"), (4, 24), jnp.float32, "params", 1, ("embed",), False),
        "layers/block/up": ParamSpec(
            ("layers", "embed", "mlp"), (4, 24, 40), jnp.float32, "params", 1, ("embed",), True
        ),
    }


@pytest.mark.few(mesh=[{"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 4, "tensor": 2}, {"zero": 3}),
        ({"data": 2, "tensor": 4}, {"zero": 3, "auto": True}),
        ({"replica": 2, "data": 2, "tensor": 2}, {}),
    ],
)
def test_initial_values_are_the_same_bits_on_every_mesh(mesh, options, seed, placed):
    one = flat(initialise(Model(), seed, placed())[0])
    for path, values in flat(initialise(Model(), seed, placed(mesh, **options))[0]).items():
        assert values.tobytes() == one[path].tobytes(), (mesh, path)


def test_a_layers_values_are_those_it_has_in_a_deeper_or_shallower_stack_and_alone(seed, placed):
    stacked = flat(initialise(Model(4), seed, placed())[0])["layers/block/up"]
    shallow = flat(initialise(Model(2), seed, placed())[0])["layers/block/up"]
    assert shallow.tobytes() == stacked[:2].tobytes()

    @jax.jit
    def alone(layer):
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"layers/block/up"))
        return fan_in("embed")(jax.random.fold_in(key, layer), ("embed", "mlp"), (24, 40))

    for layer in range(4):
        assert np.asarray(alone(layer)).tobytes() == stacked[layer].tobytes()


def test_values_follow_the_logical_layer_whatever_the_order_and_the_period_of_storage(seed, placed):
    plain = flat(initialise(Model(4), seed, placed())[0])["layers/block/up"]
    permuted = Model(4)
    permuted.layers.block.up.set_metadata(layers=(2, 0, 3, 1))
    stored = flat(initialise(permuted, seed, placed())[0])["layers/block/up"]
    assert stored.tobytes() == plain[[2, 0, 3, 1]].tobytes()

    class Alternating(nnx.Module):
        def __init__(self):
            self.layers = Depth(Segment(2, other=Block(), block=Block()))

    alternating = flat(initialise(Alternating(), seed, placed())[0])["layers/block/up"]
    assert alternating.tobytes() == plain[[1, 3]].tobytes()


def test_identity_layers_are_zeros_after_the_same_bits(seed, placed):
    plain, stages = Model(3), placed({"pipe": 4}, pad_layers=True)
    module = Model(3)
    assert pad_layers(module, stages) == {3: 4}
    assert parameters(module)["layers/block/up"].logical_shape == parameters(plain)["layers/block/up"].shape
    ones = flat(initialise(plain, seed, placed())[0])
    for path, values in flat(initialise(module, seed, stages)[0]).items():
        assert values.shape[0] == (4 if path.startswith("layers/") else ones[path].shape[0])
        assert values[: len(ones[path])].tobytes() == ones[path].tobytes(), path
        assert not np.any(values[len(ones[path]) :]), path


def test_paths_layers_and_seeds_have_values_of_their_own(seed, placed):
    one, other = (flat(initialise(Model(), s, placed())[0]) for s in (seed, seed + 1))
    assert not np.array_equal(one["head"], other["head"])
    assert not np.array_equal(one["layers/block/up"][0], one["layers/block/up"][1])


def test_another_seed_and_another_model_of_the_same_shapes_compile_nothing_anew(placed, caplog):
    def programs(layers, seed):
        caplog.clear()
        with jax.log_compiles():
            initialise(Model(layers), seed, placed({"data": 2}))
        return caplog.text.count("Finished XLA compilation of jit(make)")

    assert programs(5, 0) == 1
    assert programs(5, 1) == 0


def test_an_init_without_a_hash_is_refused_by_its_parameters_name(placed):
    @dataclass
    class Ones:
        def __call__(self, key, axes, shape):
            return jnp.ones(shape)

    model = Model()
    model.head.set_metadata(init=Ones())
    with pytest.raises(UserError, match=r"^head: its init, a Ones, has no hash"):
        initialise(model, 0, placed())


def test_arrays_are_made_where_their_kind_is_stored(placed):
    placement = placed({"data": 4, "tensor": 2}, zero=3)
    up = initialise(Model(), 0, placement)[0]["layers"]["block"]["up"]
    assert up.sharding.is_equivalent_to(placement.sharding(("layers", "embed", "mlp"), "params"), 3)
    assert up.addressable_shards[0].data.shape == (4, 6, 20)


def test_initializers_have_the_variance_that_they_promise(rng):
    key = jax.random.key(int(rng.integers(2**31)))
    shape = (64, 32, 16)
    spread = np.std(jax.jit(lambda: fan_in("a b", 0.5)(key, ("a", "b", "c"), shape))())
    assert abs(spread / (0.5 * (64 * 32) ** -0.5) - 1) < 0.05
    assert abs(np.std(jax.jit(lambda: normal(0.02)(key, ("a", "b", "c"), shape))()) / 0.02 - 1) < 0.05
    np.testing.assert_array_equal(constant(3.0)(key, ("a",), (2,)), [3.0, 3.0])


def test_the_default_sums_over_the_first_axis(rng):
    key = jax.random.key(int(rng.integers(2**31)))
    init = Param("embed mlp", {"embed": 400, "mlp": 40}).init
    made = jax.jit(lambda key: init(key, ("embed", "mlp"), (400, 40)))(key)
    assert abs(np.std(made) * 20 - 1) < 0.05


def test_weight_decay_is_for_matrices_unless_it_is_said():
    assert Param("embed mlp", DIMS).decay
    assert not Param("embed", DIMS).decay
    assert not Param("heads head_dim", DIMS, constant(0.0), decay=False).decay


def test_an_axis_without_a_size_is_refused_with_the_nearest_one():
    with pytest.raises(PatternError, match=r"Param\('embd mlp'\): no size for axis 'embd'\. Did you mean 'embed'"):
        Param("embd mlp", DIMS)


def test_a_role_takes_the_size_of_its_axis():
    assert Param("embed.expert mlp", DIMS).get_value() == jax.ShapeDtypeStruct((24, 40), jnp.float32)
