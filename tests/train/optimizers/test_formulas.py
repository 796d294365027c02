"""Three steps of each optimizer by its paper, in NumPy and float64."""

import math

import jax
import numpy as np
import optax
import pytest

from axon.train.optimizers import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    Constant,
    Linear,
    Lion,
    Muon,
    Optax,
    ScheduleFreeAdamW,
)

SCHEDULE = Linear(0.02, warmup=2, steps=5)
RATES = [0.01, 0.02, 0.02]
DECAY = 0.3
STACKED = ("layers/query", "layers/out", "layers/down")


@pytest.fixture
def parameters(parameters):
    """Of those that differ in their size alone one."""
    return {path: spec for path, spec in parameters.items() if path not in ("head", "layers/up", "layers/scale")}


@pytest.fixture
def steps(parameters, draw, moved):
    """steps(optimizer, direction, decay=DECAY): its three steps are −rate·(direction + decay·value), where
    direction(path, t, gradient, memory, value) keeps what it likes in memory."""

    def run(optimizer, direction, decay=DECAY, gradients=None):
        values, gradients = draw(), gradients or [draw() for _ in RATES]
        made = moved(optimizer, parameters, values, gradients).values
        expected = {path: value.astype(np.float64) for path, value in values.items()}
        memory = {path: {} for path in values}
        for t, (rate, gradient) in enumerate(zip(RATES, gradients, strict=True)):
            for path, value in expected.items():
                towards = direction(path, t, gradient[path].astype(np.float64), memory[path], value)
                expected[path] = value - rate * (towards + decay * parameters[path].decay * value)
        for path, value in expected.items():
            np.testing.assert_allclose(made[path], value, rtol=1e-5, atol=1e-5, err_msg=path)

    return run


def test_lion(steps, draw):
    """Of odd multiples of 1/128, whose sums with these factors are exact and never zero: a sign has no tolerance."""

    def direction(path, t, g, memory, value):
        m = memory.get("m", np.zeros_like(g))
        memory["m"] = 0.25 * m + 0.75 * g
        return np.sign(0.75 * m + 0.25 * g)

    gradients = [{path: (2 * np.floor(64 * g) + 1) / 128 for path, g in draw().items()} for _ in RATES]
    steps(Lion(SCHEDULE, b1=0.75, b2=0.25, weight_decay=DECAY), direction, gradients=gradients)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(steps, nesterov):
    def direction(path, t, g, memory, value):
        memory["m"] = 0.7 * memory.get("m", 0.0) + g
        return g + 0.7 * memory["m"] if nesterov else memory["m"]

    steps(SGD(SCHEDULE, momentum=0.7, nesterov=nesterov, weight_decay=DECAY), direction)


def test_an_optax_transformation(steps):
    def direction(path, t, g, memory, value):
        memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * g
        memory["v"] = 0.99 * memory.get("v", 0.0) + 0.01 * g**2
        return memory["m"] / (1 - 0.9 ** (t + 1)) / (np.sqrt(memory["v"] / (1 - 0.99 ** (t + 1))) + 1e-8)

    steps(Optax(lambda rate: optax.adam(rate, b2=0.99), SCHEDULE), direction, decay=0.0)


def test_adafactor(steps, parameters):
    optimizer = Adafactor(SCHEDULE, b1=0.6, decay_power=0.7, threshold=0.9, floor=0.05, weight_decay=DECAY)

    def of_matrix(g, memory, past):
        rows, columns = np.mean(g**2, 1, keepdims=True), np.mean(g**2, 0, keepdims=True)
        memory["r"] = past * memory.get("r", 0.0) + (1 - past) * rows
        memory["c"] = past * memory.get("c", 0.0) + (1 - past) * columns
        return g / np.sqrt(memory["r"] * memory["c"] / np.mean(memory["r"]))

    def of_vector(g, memory, past):
        memory["v"] = past * memory.get("v", 0.0) + (1 - past) * g**2
        return g / np.sqrt(memory["v"])

    def one(path, t, g, memory, value):
        rule = of_matrix if parameters[path].decay else of_vector
        u = rule(g, memory, 1 - (t + 1) ** -0.7)
        u = u / max(1.0, rms(u) / 0.9)
        memory["m"] = 0.6 * memory.get("m", 0.0) + 0.4 * u
        return memory["m"] * max(0.05, rms(value))

    steps(optimizer, by_matrix(one, parameters))


def rms(x):
    return np.sqrt(np.mean(x**2))


def by_matrix(one, parameters):
    """The direction of a parameter whose layers and experts each have theirs, matrices as inputs × outputs."""

    def direction(path, t, g, memory, value):
        spec = parameters[path]
        count = sum(name in ("layers", "experts") for name in spec.axes)
        inside = spec.axes[count:]
        inputs = math.prod(s for n, s in zip(inside, spec.shape[count:], strict=True) if n in spec.inputs)
        shape = (-1, inputs, math.prod(spec.shape[count:]) // inputs) if spec.decay else (-1, *spec.shape[count:])
        parts = zip(g.reshape(shape), value.reshape(shape), strict=True)
        made = [one(path, t, g, memory.setdefault(i, {}), v) for i, (g, v) in enumerate(parts)]
        return np.stack(made).reshape(g.shape)

    return direction


@pytest.mark.parametrize("scale", ["fan", "rms"])
def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw(parameters, draw, moved, scale):
    """Where one step's momentum is the gradient: u vᵀ of each, by NumPy's own decomposition; AdamW's step is a sign."""
    optimizer = Muon(Constant(0.02), AdamW(Constant(0.05), weight_decay=0.0), scale=scale, steps=8, weight_decay=DECAY)
    values, gradient = draw(), draw()
    made = moved(optimizer, parameters, values, [gradient]).values
    size = {"fan": lambda i, o: max(1.0, o / i) ** 0.5, "rms": lambda i, o: 0.2 * max(i, o) ** 0.5}[scale]

    def orthogonal(path, t, g, memory, value):
        u, _, v = np.linalg.svd(g, full_matrices=False)
        return size(*g.shape) * u @ v

    for path, value in values.items():
        if path.startswith("layers/") and parameters[path].decay:
            towards = by_matrix(orthogonal, parameters)(path, 0, gradient[path].astype(np.float64), {}, value)
            expected = value - 0.02 * (towards + DECAY * value)
        else:
            expected = value - 0.05 * np.sign(gradient[path])
        np.testing.assert_allclose(made[path], expected, atol=1e-4, err_msg=path)


@pytest.mark.full
def test_muons_momentum_looks_ahead(parameters, draw, moved):
    """Of gradients along one direction, Nesterov's update is that of the plain momentum of 0.9·m + g."""
    first, second, values = draw(), draw(), draw()
    rest = AdamW(Constant(0.02))
    made = moved(Muon(Constant(0.02), rest, momentum=0.9), parameters, values, [first, second]).values
    after = moved(Muon(Constant(0.02), rest, momentum=0.9), parameters, values, [first]).values
    ahead = {path: g + 0.9 * (g + 0.9 * first[path]) for path, g in second.items()}
    expected = moved(Muon(Constant(0.02), rest, momentum=0.0, nesterov=False), parameters, after, [ahead]).values
    for path in STACKED:
        np.testing.assert_allclose(made[path], expected[path], atol=1e-5, err_msg=path)


def test_a_moving_average_weighs_the_values_after_each_step_and_not_the_initial_ones(parameters, draw, moved):
    inner, values, gradients = SGD(Constant(0.1), momentum=0.5), draw(), [draw() for _ in range(4)]
    optimizer = EMA(inner, decay=0.7)
    after = [moved(inner, parameters, values, gradients[: n + 1]).values for n in range(4)]
    made = moved(optimizer, parameters, values, gradients)
    weights = np.array([0.7**3, 0.7**2, 0.7, 1.0])
    for path, value in jax.jit(optimizer.evaluated)(made.state, made.values).items():
        np.testing.assert_array_equal(made.values[path], after[-1][path], err_msg="training is the optimizer's alone")
        mean = np.average([np.asarray(one[path], np.float64) for one in after], axis=0, weights=weights)
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6, err_msg=path)


def test_schedule_free_adamw(parameters, draw, moved):
    optimizer = ScheduleFreeAdamW(SCHEDULE, b1=0.8, b2=0.9, eps=1e-6, weight_decay=DECAY, weight_power=1.5)
    values, gradients = draw(), [draw() for _ in RATES]
    made = moved(optimizer, parameters, values, gradients)
    averages = jax.jit(optimizer.evaluated)(made.state, made.values)
    for path, value in values.items():
        x = z = y = value.astype(np.float64)
        v, weights = 0.0, 0.0
        for t, (rate, gradient) in enumerate(zip(RATES, gradients, strict=True), 1):
            g = gradient[path].astype(np.float64)
            v = 0.9 * v + 0.1 * g**2
            z = z - rate * (g / (np.sqrt(v / (1 - 0.9**t)) + 1e-6) + DECAY * parameters[path].decay * y)
            weight = max(RATES[:t]) ** 1.5
            weights += weight
            x = x + weight / weights * (z - x)
            y = 0.2 * z + 0.8 * x
        np.testing.assert_allclose(made.values[path], y, rtol=1e-5, atol=1e-5, err_msg=path)
        np.testing.assert_allclose(averages[path], x, rtol=1e-5, atol=1e-5, err_msg=path)


def test_soap_is_adam_in_bases_found_by_power_iteration(parameters, draw, moved):
    """With sides of 12 at most: those of 20 keep their own basis. The first step only finds the bases."""
    optimizer = SOAP(Constant(0.02), b1=0.8, b2=0.9, eps=1e-3, every=2, largest=12, weight_decay=DECAY)
    values, gradients = draw(), [draw() for _ in range(4)]
    made = moved(optimizer, parameters, values, gradients).values

    def turned(basis, mean, iterations):
        shifted = mean / (np.trace(mean) / len(mean)) + 1e-2 * np.eye(len(mean))
        for _ in range(iterations):
            basis = np.linalg.qr(shifted @ basis)[0]
        return basis

    def one(path, t, g, memory, value):
        sides = [d for d in range(g.ndim) if parameters[path].decay and g.shape[d] <= 12]
        bases = [np.eye(n) for n in g.shape]
        for d in sides:
            outer = g @ g.T if d == 0 else g.T @ g
            memory[d] = 0.9 * memory.get(d, 0.0) + 0.1 * outer
            basis = memory.get(("basis", d), np.eye(len(outer)))
            bases[d] = memory["basis", d] = turned(basis, memory[d], 10 if t == 0 else int(t % 2 == 0))
        if t == 0:
            return np.zeros_like(g)

        def rotate(x, bases):
            return bases[0].T @ x @ bases[1] if x.ndim == 2 and parameters[path].decay else x

        memory["m"] = 0.8 * memory.get("m", 0.0) + 0.2 * g
        memory["v"] = 0.9 * memory.get("v", 0.0) + 0.1 * rotate(g, bases) ** 2
        step = rotate(memory["m"], bases) / (1 - 0.8**t) / (np.sqrt(memory["v"] / (1 - 0.9**t)) + 1e-3)
        return rotate(step, [b.T for b in bases])

    direction, memory = by_matrix(one, parameters), {path: {} for path in values}
    expected = {path: value.astype(np.float64) for path, value in values.items()}
    for t, gradient in enumerate(gradients):
        for path, value in expected.items():
            towards = direction(path, t, gradient[path].astype(np.float64), memory[path], value)
            expected[path] = value - 0.02 * (towards + DECAY * parameters[path].decay * value)
    for path, value in expected.items():  # where eigenvalues are close, float32 turns a basis by more than its rounding
        np.testing.assert_allclose(made[path], value, atol=2e-3, err_msg=path)
