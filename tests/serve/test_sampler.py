"""How the tokens of a step are drawn: against the chain in NumPy, against exact distributions, and row by row."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from axon.errors import UserError
from axon.kernels.sampling.draw import gumbel
from axon.serve.policy import BIASES, Policy, Row, draws, variants
from axon.serve.request import Sampling
from axon.serve.sampler import draw

SIZE, VOCAB, LONGEST = 16, 100, 50
run = jax.jit(draw)

FILTERS = {
    "nothing": {},
    "a temperature": {"temperature": 1.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {0: 1.5, 7: -100.0, 3: 0.25}},
    "all": {
        "temperature": 1.2,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 0.7,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.0, 11: -2.0},
    },
}


def mask_of(allowed):
    """Bits of a grammar that allows these, booleans `vocab`."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def changed(logits, sampling, prompt, text, allowed=None):
    """The definition, of one row: logits as penalties, bias and mask leave them, float64."""
    found = logits.astype(np.float64)
    for token in {*prompt, *text}:
        factor = sampling.repetition_penalty
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token, count in Counter(text).items():
        found[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        found[token] += bias
    return found if allowed is None else np.where(allowed, found, -np.inf)


def chances(logits, sampling, more=0.0):
    """The distribution of the changed `logits`, float64; of top-p and min-p a share `more` is kept."""
    powers = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_k is not None:
        powers[logits < np.sort(logits)[-min(sampling.top_k, len(logits))]] = 0
    if sampling.top_p is not None:
        before = np.array([powers[logits > one].sum() for one in logits])
        powers[before >= sampling.top_p * (1 + more) * powers.sum()] = 0
    powers[powers < (sampling.min_p or 0) * (1 - more) * powers.max()] = 0
    return powers / powers.sum()


def random_sampling(rng):
    bias = {int(token): float(rng.normal() * 3) for token in rng.choice(VOCAB, rng.integers(4), replace=False)}
    return Sampling(
        temperature=float(rng.choice([0, 0.6, 1.5])),
        top_k=rng.choice([None, 3, 30]),
        top_p=rng.choice([None, 0.5, 0.95]),
        min_p=rng.choice([None, 0.02]),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        repetition_penalty=float(rng.choice([1, 1.4, 0.8])),
        presence_penalty=float(rng.choice([0, 1.1])),
        frequency_penalty=float(rng.choice([0, -0.4])),
        logit_bias=bias,
        logprobs=rng.choice([None, 0, 4]),
    )


def random_rows(rng, count):
    """Rows, and of each how it is drawn, its request's prompt, its text and what its grammar allows."""
    rows, told = [], []
    for _ in range(count):
        prompt, text = rng.integers(0, VOCAB, 9).tolist(), rng.integers(0, VOCAB // 9, rng.integers(12)).tolist()
        allowed = rng.random(VOCAB) < 0.6 if rng.random() < 0.5 else None
        allowed = None if allowed is None else allowed | (np.arange(VOCAB) == rng.integers(VOCAB))
        sampling, known = random_sampling(rng), int(rng.integers(len(text) + 1))
        policy = Policy(sampling, prompt, VOCAB)
        policy.add(text[:known])
        told.append((sampling, prompt, text, allowed))
        mask = None if allowed is None else mask_of(allowed)
        rows.append(Row(policy, len(text), text[known:], mask))
    return rows, told


def of(rows, logits):
    """What is drawn, as NumPy arrays of the rows alone."""
    padded = np.zeros((SIZE, VOCAB), np.float32)
    padded[: len(rows)] = logits
    return jax.tree.map(lambda x: np.asarray(x)[: len(rows)], run(padded, draws(rows, SIZE, VOCAB)))


def test_a_draw_is_the_likeliest_of_the_references_chain_and_its_own_noise(rng):
    for _ in range(3):
        rows, told = random_rows(rng, SIZE)
        logits = (rng.normal(size=(SIZE, VOCAB)) * 3).astype(np.float32)
        found = of(rows, logits)
        assert np.all(found.valid)
        for row, (sampling, prompt, text, allowed), own, drawn in zip(rows, told, logits, found.ids, strict=True):
            left = changed(own, sampling, prompt, text, allowed)
            if sampling.temperature == 0:
                assert left[drawn] > left.max() - 1e-5
                continue
            key = jax.random.wrap_key_data(np.array(divmod(sampling.seed, 2**32), np.uint32), impl="threefry2x32")
            noise = gumbel(jax.random.bits(jax.random.fold_in(key, row.position), (VOCAB,), jnp.uint32))
            scores = left / sampling.temperature + np.asarray(noise)
            fewer, more = (np.where(chances(left, sampling, by) > 0, scores, -np.inf) for by in (-1e-5, 1e-5))
            assert fewer.max() - 1e-4 < scores[drawn] <= more.max()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.few(name=("top-p", "frequency", "all"))
def test_draws_follow_the_exact_distribution(name, rng):
    rows, vocab = 4096, 16
    logits, prompt, text = rng.normal(size=vocab).astype(np.float32), [1, 4, 4, 9], [2, 2, 2, 9, 11]
    sampling = Sampling(**{"temperature": 1.0, **FILTERS[name]}, seed=int(rng.integers(2**64, dtype=np.uint64)))
    allowed = None if name != "all" else np.arange(vocab) != 5
    policy = Policy(sampling, prompt, vocab)
    policy.add(text)
    mask = None if allowed is None else mask_of(allowed)
    step = draws([Row(policy, position, mask=mask) for position in range(rows)], rows, vocab)
    found = np.bincount(run(np.broadcast_to(logits, (rows, vocab)), step).ids, minlength=vocab)
    expected = rows * chances(changed(logits, sampling, prompt, text, allowed), sampling)
    assert np.all(found[expected == 0] == 0)
    rare = expected < 5  # counted as one, as the test wants 5 of each
    found, expected = (np.append(x[~rare], x[rare].sum()) for x in (found, expected))
    kept = expected > 0
    if kept.sum() == 1:  # a filter may leave one token, with all draws, and a test of one has no p
        np.testing.assert_array_equal(found[kept], rows)
    else:
        assert chisquare(found[kept], expected[kept]).pvalue > 1e-6


def test_a_draw_depends_neither_on_other_rows_nor_on_its_place(rng):
    rows, _ = random_rows(rng, SIZE)
    logits = rng.normal(size=(SIZE, VOCAB)).astype(np.float32)
    together, order = of(rows, logits).ids, rng.permutation(SIZE)
    np.testing.assert_array_equal(of([rows[i] for i in order], logits[order]).ids, together[order])
    for i in range(SIZE):  # by the other program, where it changes no logits
        assert of([rows[i]], logits[i : i + 1]).ids == together[i]


def test_logits_that_are_nan_or_allow_nothing_disturb_no_other_row(rng):
    rows, _ = random_rows(rng, SIZE)
    logits = rng.normal(size=(SIZE, VOCAB)).astype(np.float32)
    good, bad = of(rows, logits), rng.choice(SIZE, 4, replace=False)
    logits[bad[0]], logits[bad[1], 7], logits[bad[2]], logits[bad[3], 5] = np.nan, np.nan, -np.inf, np.inf
    rows[bad[1]] = rows[bad[1]]._replace(mask=None)
    rows[bad[3]] = rows[bad[3]]._replace(mask=None)
    found, others = of(rows, logits), np.setdiff1d(np.arange(SIZE), bad)
    np.testing.assert_array_equal(np.flatnonzero(~found.valid), np.sort(bad))
    assert np.all((found.ids >= 0) & (found.ids < VOCAB))
    for before, after in zip(jax.tree.leaves(good), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(before[others], after[others])


def test_a_grammar_that_allows_nothing_is_seen(rng):
    policy = Policy(Sampling(), [0], VOCAB)
    rows = [Row(policy, 0, mask=mask_of(np.zeros(VOCAB, bool))), Row(policy, 0)]
    assert of(rows, rng.normal(size=(2, VOCAB))).valid.tolist() == [False, True]


def test_a_grammar_of_fewer_ids_than_the_model_has_allows_none_of_the_rest(rng):
    rows = [
        Row(Policy(Sampling(temperature=50.0), [0], VOCAB), at, mask=mask_of(np.ones(32, bool))) for at in range(SIZE)
    ]
    assert np.all(of(rows, np.zeros((SIZE, VOCAB))).ids < 32)


def test_log_probabilities_are_of_the_logits_before_anything_changes_them(rng):
    rows, _ = random_rows(rng, SIZE)
    rows[0] = rows[0]._replace(policy=Policy(Sampling(logprobs=20), [0], VOCAB))
    rows[1] = rows[1]._replace(scored_token=42)
    logits = (rng.normal(size=(SIZE, VOCAB)) * 4).astype(np.float32)
    found, exact = of(rows, logits), logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.logprobs, exact[np.arange(SIZE), found.ids], atol=1e-4)
    np.testing.assert_allclose(found.scored_logprobs[1], exact[1, 42], atol=1e-4)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :20])
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-exact, axis=1)[:, :20], atol=1e-4)


def test_what_is_not_asked_is_not_computed(rng):
    one = Policy(Sampling(), [0], VOCAB)
    plain = jax.make_jaxpr(draw)(np.zeros((SIZE, VOCAB), np.float32), draws([Row(one, 0)], SIZE, VOCAB))
    always = {eqn.primitive.name for eqn in plain.eqns}  # what is in a branch is not among them
    assert "cond" in always
    assert not always & {"scatter", "top_k", "sort", "random_bits"}
    found = of([Row(one, 0)], rng.normal(size=(1, VOCAB)))
    assert not any(np.any(x) for x in (found.logprobs, found.scored_logprobs, found.top_ids, found.top_logprobs))


def test_a_row_that_is_only_looked_at_asks_for_no_draw(rng):
    policy = Policy(Sampling(repetition_penalty=2.0, logit_bias={3: 100.0}, temperature=9.0), [1, 2], VOCAB)
    row = Row(policy, 0, scored_token=8, mask=mask_of(np.zeros(VOCAB, bool)))
    step = draws([row], SIZE, VOCAB)
    assert step.entries is None
    assert step.mask is None
    logits = rng.normal(size=(1, VOCAB)).astype(np.float32)
    found = of([row], logits)
    assert found.ids == logits.argmax()
    np.testing.assert_allclose(found.scored_logprobs, jax.nn.log_softmax(logits)[0, 8], atol=1e-5)


def test_temperature_0_takes_the_first_of_the_likeliest(rng):
    logits = rng.integers(0, 3, (SIZE, VOCAB)).astype(np.float32)
    rows = [Row(Policy(Sampling(temperature=0, seed=i), [0], VOCAB), i) for i in range(SIZE)]
    np.testing.assert_array_equal(of(rows, logits).ids, logits.argmax(axis=1))


def test_each_bit_of_a_seed_and_each_position_draws_anew():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    policies = [Policy(Sampling(seed=seed), [0], 10**5) for seed in seeds]
    rows = [Row(policy, at) for policy in policies for at in (0, 1)]
    ids = np.asarray(run(np.zeros((len(rows), 10**5), np.float32), draws(rows, len(rows), 10**5)).ids)
    assert len(set(ids.tolist())) >= len(rows) - 1


def test_drafts_count_as_text_that_was_added(rng):
    for _ in range(20):
        sampling, prompt = random_sampling(rng), rng.integers(0, VOCAB, 20).tolist()
        text, at = rng.integers(0, VOCAB, 12).tolist(), int(rng.integers(13))
        whole, parts = Policy(sampling, prompt, VOCAB), Policy(sampling, prompt, VOCAB)
        for token in text:
            whole.add([token])
        parts.add(text[:at])
        before = parts.entries().copy()
        np.testing.assert_array_equal(parts.entries(text[at:]), whole.entries())
        np.testing.assert_array_equal(parts.entries(), before)


def test_no_step_has_a_shape_that_is_not_among_the_variants(rng):
    warm = jax.jit(lambda logits, step: draw(logits, step))
    logits = np.zeros((SIZE, VOCAB), np.float32)
    for step in variants(SIZE, VOCAB, LONGEST):
        warm(logits, step)
    programs = warm._cache_size()
    for count in (0, 1, SIZE, SIZE):
        warm(logits, draws(random_rows(rng, count)[0], SIZE, VOCAB))
    full = Policy(Sampling(repetition_penalty=2.0), list(range(VOCAB)), VOCAB)
    warm(logits, draws([Row(full, 0)] * SIZE, SIZE, VOCAB))
    assert warm._cache_size() == programs == len(variants(SIZE, VOCAB, LONGEST))


def test_there_is_room_for_all_logits_that_requests_can_change(rng):
    for _ in range(50):
        size, vocab, longest = (int(n) for n in rng.integers(1, [100, 3000, 3000]))
        most = draws(
            [Row(Policy(Sampling(repetition_penalty=2.0), range(min(vocab, longest)), vocab), 0)] * size, size, vocab
        )
        assert any(most.entries.shape == step.entries.shape for step in variants(size, vocab, longest)[1:])


def test_a_mesh_draws_as_one_device(rng, placed, compiled):
    rows, _ = random_rows(rng, SIZE)
    logits, step = rng.normal(size=(SIZE, VOCAB)).astype(np.float32), draws(rows, SIZE, VOCAB)
    found = compiled(placed({"tensor": 2}), draw, logits, step)
    np.testing.assert_array_equal(found.ids, of(rows, logits).ids)


def test_biases_and_stop_ids_that_cannot_be_are_refused():
    for token in (-1, VOCAB):
        with pytest.raises(UserError, match=rf"Sampling\.stop_ids has the id {token}; this model's are from 0 to 99"):
            Policy(Sampling(stop_ids=(3, token)), [0], VOCAB)
        with pytest.raises(UserError, match=rf"logit_bias has the id {token}; this model's are from 0 to 99"):
            Policy(Sampling(logit_bias={token: 1.0}), [0], VOCAB)
    with pytest.raises(UserError, match="logit_bias has 1025 ids; give 1024 at most"):
        Policy(Sampling(logit_bias=dict.fromkeys(range(BIASES + 1), 1.0)), [0], 2**20)


def test_more_rows_than_there_is_room_for_are_refused():
    row = Row(Policy(replace(Sampling(), seed=3), [0], VOCAB), 0)
    with pytest.raises(ValueError, match="broadcast"):
        draws([row] * (SIZE + 1), SIZE, VOCAB)
