"""Outer methods and 1-bit Adam on a small model, against loops over replicas that never share a program."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn import Rope, Routing
from axon.parallel.outer import DiLoCo, SlowMo
from axon.runtime import nested
from axon.train.masked import MaskedToken
from axon.train.objective import MultiToken, NextToken
from axon.train.optimizers import AdamW, Linear, OneBitAdam
from axon.train.step import Program
from axon.train.step import Program as program
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gpt2 import GPT2
from models.llama import Llama
from models.mixtral import Mixtral

MODEL = Llama(vocab=64, embed=32, layers=1, heads=4, kv_heads=4, mlp=48)
MESH = {"replica": 2, "data": 2, "tensor": 2}
ADAM = AdamW(Linear(0.01, warmup=3, steps=20), eps=1e-4, clip=0.5)
ROWS, SEQ, EVERY = 8, 16, 2


def made(layout, optimizer=ADAM, model=MODEL, rows=ROWS, **options):
    devices = jax.devices()[: int(np.prod(list(layout.mesh.values())))]
    return program(model, layout, optimizer, batch=rows, seq=SEQ, devices=devices, **options)


def run(program, state, batches):
    """The last state, and loss, gradient norm, tokens and learning rate of every step."""
    curve = []
    for batch in batches:
        state, metrics = jax.block_until_ready(program.step(state, program.place(batch)))
        curve.append([float(metrics[name]) for name in ("loss", "grad_norm", "tokens", "learning_rate")])
    return state, np.array(curve)


def halves(batch):
    """The rows of each of two replicas."""
    return [{name: x[part] for name, x in batch.items()} for part in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))]


def assert_close(ours, theirs, atol=2e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def alone():
    """A plain program on one device with the rows of one replica, and the values it starts from."""
    one = made(Layout({"data": 1}), rows=ROWS // 2)
    return one, jax.device_get(one.init().parameters)


def begin(program, values):
    shardings = jax.tree.map(lambda a: a.sharding, program.abstract_state().parameters)
    return program.init(jax.device_put(values, shardings))


def loop(alone, batches, method):
    """The outer method by hand: two replicas one after another, and the paper's outer step in float64."""
    one, values = alone
    x = jax.tree.map(lambda v: v.astype(np.float64), values)
    m = jax.tree.map(np.zeros_like, x)
    states, curve = [begin(one, values) for _ in range(2)], []
    rates = [float(ADAM.schedule.function()(i)) for i in range(len(batches))]
    for step, batch in enumerate(batches, 1):
        made = [run(one, s, [half]) for s, half in zip(states, halves(batch), strict=True)]
        states = [state for state, _ in made]
        (a, b) = (row[0] for _, row in made)
        tokens = a[2] + b[2]
        norm = np.sqrt((a[1] ** 2 + b[1] ** 2) / 2)
        curve.append([(a[0] * a[2] + b[0] * b[2]) / tokens, norm, tokens, a[3]])
        if step % method.every == 0:
            mean = jax.tree.map(lambda p, q: (np.float64(p) + q) / 2, *jax.device_get([s.parameters for s in states]))
            delta = jax.tree.map(np.subtract, x, mean)
            if isinstance(method, DiLoCo):
                m = jax.tree.map(lambda m, d: method.momentum * m + d, m, delta)
                nesterov = jax.tree.map(lambda m, d: d + method.momentum * m, m, delta)
                x = jax.tree.map(lambda x, n: x - method.learning_rate * n, x, nesterov)
            else:
                gamma = np.mean(rates[step - method.every : step])
                m = jax.tree.map(lambda m, d, g=gamma: method.momentum * m + d / g, m, delta)
                x = jax.tree.map(lambda x, m, g=gamma: x - method.learning_rate * g * m, x, m)
            now = jax.tree.map(lambda v: v.astype(np.float32), x)
            states = [jax.device_put(type(s)(s.step, now, s.optimizer), s.step.sharding) for s in states]
    return x, np.array(curve), [jax.device_get(s) for s in states]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        (DiLoCo(EVERY), Layout(MESH, zero=1)),
        (SlowMo(EVERY, momentum=0.6), Layout(MESH, zero=3, microbatches=2)),
        (SlowMo(EVERY, 1.0, 0.0), Layout({"replica": 2}, auto=True)),
    ],
    ids=["DiLoCo", "SlowMo", "local SGD"],
)
def test_five_steps_are_those_of_a_loop_over_replicas(method, layout, alone, rng, packed_batch):
    batches = [packed_batch(rng, ROWS, SEQ, MODEL.vocab) for _ in range(5)]
    outer = made(layout, outer=method)
    state, curve = run(outer, begin(outer, alone[1]), batches)
    x, expected, states = loop(alone, batches, method)
    np.testing.assert_allclose(curve, expected, rtol=2e-5)
    assert_close(state.parameters, x)
    state = jax.device_get(state)
    for replica, theirs in enumerate(states):  # the fifth step is after the last outer step: replicas differ
        assert_close(jax.tree.map(lambda v, r=replica: v[r], state.optimizer["parameters"]), theirs.parameters)
        assert_close(jax.tree.map(lambda v, r=replica: v[r], state.optimizer["optimizer"]), theirs.optimizer)


STAGED = {
    "pipe": (DiLoCo(EVERY), MODEL, {"mesh": {"pipe": 2}}),
    "pipe × data": (DiLoCo(EVERY), MODEL, {"mesh": {"pipe": 2, "data": 2}}),
    "pipe × tensor": (SlowMo(EVERY, momentum=0.6), MODEL, {"mesh": {"pipe": 2, "tensor": 2}}),
}


@pytest.mark.some(name=tuple(STAGED)[1:])
@pytest.mark.full
@pytest.mark.parametrize("name", STAGED)
def test_each_replica_may_have_stages_of_its_own(name, rng, packed_batch):
    method, model, fields = STAGED[name]
    model = replace(model, layers=2)
    batches = [packed_batch(rng, ROWS, SEQ, MODEL.vocab) for _ in range(3)]
    plain = made(Layout({"replica": 2}, microbatches=2), model=model, outer=method)
    fields = fields | {"mesh": {"replica": 2, **fields["mesh"]}}
    staged = made(Layout(**fields, microbatches=2), model=model, outer=method)
    values = jax.device_get(plain.init().parameters)
    expected, curve = run(plain, begin(plain, values), batches)
    found, staged_curve = run(staged, begin(staged, values), batches)
    np.testing.assert_allclose(staged_curve, curve, rtol=2e-5)
    assert_close(found.parameters, expected.parameters)
    assert_close(found.variables, expected.variables)


@pytest.mark.full
def test_replicas_with_the_same_rows_and_a_whole_outer_step_are_plain_training(alone, rng, packed_batch):
    one, values = alone
    batches = [packed_batch(rng, ROWS // 2, SEQ, MODEL.vocab) for _ in range(4)]
    twice = [{name: np.concatenate([x, x]) for name, x in batch.items()} for batch in batches]
    outer = made(Layout({"replica": 2}), outer=DiLoCo(1, learning_rate=1.0, momentum=0.0))
    state, curve = run(outer, begin(outer, values), twice)
    plain, expected = run(one, begin(one, values), batches)
    np.testing.assert_allclose(curve[:, [0, 1, 3]], expected[:, [0, 1, 3]], rtol=1e-5)
    assert_close(state.parameters, plain.parameters)


@pytest.mark.full
def test_the_state_lies_where_it_is_promised_and_evaluation_is_of_the_outer_parameters(alone, rng, packed_batch):
    outer = made(Layout(MESH, zero=1), outer=DiLoCo(EVERY))
    batches = [packed_batch(rng, ROWS, SEQ, MODEL.vocab) for _ in range(EVERY + 1)]
    state, _ = run(outer, begin(outer, alone[1]), batches)
    assert outer._step._cache_size() == 1
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(outer.abstract_state()), strict=True
    ):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
    one, _ = alone
    plain = Program(MODEL, Layout({"data": 1}), ADAM, batch=ROWS, seq=SEQ, devices=jax.devices()[:1])
    theirs = plain.evaluate(begin(one, jax.device_get(state.parameters)), plain.place(batches[0]))
    ours = outer.evaluate(state, outer.place(batches[0]))
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)


@pytest.mark.slow
def test_every_row_drops_out_as_it_does_in_one_batch(rng, packed_batch):
    """A replica's rows have the numbers, and so the dropout masks, that they have in the global batch."""
    model = GPT2(vocab=64, embed=16, layers=1, heads=4, mlp=16, positions=SEQ, dropout=0.3)
    batch = packed_batch(rng, ROWS, SEQ, model.vocab)
    one = made(Layout({"data": 1}), model=model)
    outer = made(Layout({"replica": 2}), model=model, outer=SlowMo(EVERY))
    values = jax.device_get(one.init().parameters)
    (_, plain), (_, ours) = (run(p, begin(p, values), [batch]) for p in (one, outer))
    np.testing.assert_allclose(ours[0, 0], plain[0, 0], rtol=1e-5)


def onebit(warmup):
    return OneBitAdam(ADAM.schedule, warmup, eps=ADAM.eps, clip=ADAM.clip)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(MESH, zero=1),
        pytest.param(Layout({"replica": 2, "data": 2}, auto=True), marks=pytest.mark.slow),
    ],
)
def test_one_bit_adam_in_its_warm_up_is_adam(layout, alone, rng, packed_batch):
    batches = [packed_batch(rng, ROWS, SEQ, MODEL.vocab) for _ in range(4)]
    plain, ours = made(Layout({"data": 1})), made(layout, onebit(10))
    (state, curve), (expected, theirs) = (run(p, begin(p, alone[1]), batches) for p in (ours, plain))
    np.testing.assert_allclose(curve, theirs, rtol=1e-5)
    assert_close(state.parameters, expected.parameters)


@pytest.mark.full
def test_one_bit_adam_after_its_warm_up_is_the_paper_by_loops(alone, rng, packed_batch):
    """Frozen variance, each replica's momentum of its own clipped gradient; the exchange has tests of its own."""
    batches = [packed_batch(rng, ROWS, SEQ, MODEL.vocab) for _ in range(3)]
    optimizer = onebit(2)
    ours = made(Layout({"replica": 2}), optimizer)
    warm, _ = run(ours, begin(ours, alone[1]), batches[:2])
    warm = jax.device_get(warm)
    shardings = jax.tree.map(lambda a: a.sharding, ours.abstract_state())
    state, curve = run(ours, jax.device_put(warm, shardings), batches[2:])
    state = jax.device_get(state)
    assert_close(state.optimizer["nu"], warm.optimizer["nu"], atol=0)
    rate, b1, b2 = curve[0, 3], optimizer.b1, optimizer.b2

    def moved(x, mu, nu, decays):
        size = np.sqrt(nu / (1 - b2**2)) + optimizer.eps
        return x - rate * (mu / (1 - b1**3) / size + 0.1 * x * decays)

    decays = nested({path: spec.decay for path, spec in ours.parameters.items()})
    assert_close(
        state.parameters, jax.tree.map(moved, warm.parameters, state.optimizer["mu"], warm.optimizer["nu"], decays)
    )
    one, _ = alone
    squares = []
    tokens = batches[2]["weights"].sum()
    for replica, half in enumerate(halves(batches[2])):  # what a replica's message left unsaid gives its momentum back
        share = 2 * half["weights"].sum() / tokens
        start = begin(one, warm.parameters)
        after, metrics = one.step(start, one.place(half))
        squares.append(share**2 * np.asarray(metrics["norms"]))
        gradient = nested({p: np.asarray(m) / (1 - ADAM.b1) for p, m in after.optimizer["direction"].mu.items()})
        ratio = min(1, ADAM.clip / float(metrics["grad_norm"]))
        norm = share * float(metrics["grad_norm"])
        gradient = jax.tree.map(lambda g, c=share / ratio * min(1, ADAM.clip / norm): g * c, gradient)
        momentum = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, warm.optimizer["mu"], gradient)
        for value, unsaid in zip(
            jax.tree.leaves(momentum), jax.tree.leaves(state.optimizer["worker_error"]), strict=True
        ):
            said = (value - unsaid[replica]).ravel()
            size = 8 * -(-value.size // 16)
            for chunk, of in ((said[:size], value.ravel()[:size]), (said[size:], value.ravel()[size:])):
                np.testing.assert_allclose(np.abs(chunk), np.abs(of).mean() if of.size else 0, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(curve[0, 1], np.sqrt(sum(s.sum() for s in squares) / 2), rtol=1e-5)


@pytest.mark.full
def test_replicas_that_train_separately_have_experts(packed_batch, rng):
    model = Mixtral(vocab=64, embed=32, layers=1, heads=4, kv_heads=4, mlp=16, routing=Routing(4, 2))
    execution = Execution(capacity_factor=1.0)
    ours = made(Layout({"replica": 2, "expert": 2}), model=model, outer=DiLoCo(every=2), execution=execution)
    batch = packed_batch(rng, ROWS, SEQ, model.vocab)
    _, curve = run(ours, ours.init(), [batch] * 4)
    assert curve[-1, 0] < curve[0, 0]


@dataclass(frozen=True)
class Kept(NextToken):
    """The next token's loss over a drawn half of the tokens: its terms have counts of their own."""

    def draw(self, module, batch, key):
        kept = jax.random.bernoulli(key, batch["sequences"][:, None] / ROWS, batch["weights"].shape)
        return {**batch, "kept": axes.shard(kept * batch["weights"], "batch seq")}

    def counts(self, batch):
        return super().counts(batch) | dict.fromkeys(("next_token", "loss"), jnp.sum(batch["kept"]))

    def sums(self, module, batch, key=None):
        return super().sums(module, {**batch, "weights": batch["kept"]}, key)


BERT = Bert(vocab=64, embed=16, layers=1, heads=2, mlp=32, positions=SEQ)
LATENT = {"q_latent": 16, "kv_latent": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
TWO_TOKENS = DeepSeek(64, 16, layers=1, first_dense=1, heads=2, mlp=32, multi_token=True, rope=Rope(), **LATENT)
OWN_COUNTS = {
    "own": (MODEL, Kept()),
    "masked tokens": (BERT, MaskedToken()),
    "two tokens": (TWO_TOKENS, MultiToken()),
}


@pytest.mark.parametrize(
    ("objective", "method"),
    [
        pytest.param("own", DiLoCo(EVERY), marks=pytest.mark.full),
        pytest.param("masked tokens", DiLoCo(EVERY), marks=pytest.mark.full),
        pytest.param("two tokens", SlowMo(EVERY), marks=pytest.mark.full),
        pytest.param("own", None, marks=pytest.mark.full, id="one bit"),
    ],
)
def test_each_metric_is_the_mean_over_the_global_batch_whatever_it_is_counted_by(objective, method, rng, packed_batch):
    model, objective = OWN_COUNTS[objective]
    batch = packed_batch(rng, ROWS, SEQ, model.vocab)
    batch["weights"][: ROWS // 2, SEQ // 4 :] = 0  # replicas have other shares of each count

    def first_step(layout, optimizer=ADAM, outer=None):
        p = made(layout, optimizer, model, objective=objective, outer=outer)
        _, metrics = p.step(p.init(), p.place(batch))
        return {name: float(x) for name, x in metrics.items() if name not in ("norms", "grad_norm")}

    expected = first_step(Layout({"data": 1}))
    assert "mtp_loss" in expected or not isinstance(objective, MultiToken)
    found = first_step(Layout({"replica": 2}, microbatches=2), ADAM if method else onebit(4), method)
    assert found == pytest.approx(expected, rel=1e-5)


def test_slowmo_counts_in_units_of_the_inner_rate_and_diloco_is_nesterov(rng):
    x, mean, m = rng.normal(size=(3, 9))
    new, velocity = DiLoCo(5, 0.7, 0.9).update(x, mean, m, None)
    np.testing.assert_allclose(velocity, 0.9 * m + (x - mean))
    np.testing.assert_allclose(new, x - 0.7 * ((x - mean) + 0.9 * velocity))
    new, slow = SlowMo(5, 0.8, 0.6).update(x, mean, m, 0.01)
    np.testing.assert_allclose(slow, 0.6 * m + (x - mean) / 0.01)
    np.testing.assert_allclose(new, x - 0.8 * 0.01 * slow)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: DiLoCo(0), "DiLoCo.every is 0; must be at least 1"),
        (lambda: SlowMo(5, momentum=1.0), r"SlowMo.momentum is 1.0; must be in \[0, 1\)"),
        (lambda: DiLoCo(5, learning_rate=0.0), "DiLoCo.learning_rate is 0.0; must be above 0"),
        (lambda: onebit(0), "OneBitAdam.warmup is 0: without a step of plain Adam there is no variance to freeze"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        wrong()
