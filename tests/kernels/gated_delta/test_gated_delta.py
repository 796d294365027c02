"""The gated delta rule in chunks is the loop over tokens, its gradients included, whatever the documents."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.gated_delta import gated_delta, gated_delta_reference, gated_delta_run


def drawn(rng, seq, batch=2, heads=2, per_head=3, key_dim=5, value_dim=4):
    """q, k, v, log_decay and beta as a model has them, and documents of random lengths, padding at the end."""
    normal = lambda *shape: rng.normal(size=(batch, seq, heads, *shape)).astype(np.float32)  # noqa: E731
    k = normal(key_dim)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.exp(rng.uniform(-4, 2, (batch, seq, heads, per_head))).astype(np.float32)
    beta = rng.uniform(0, 1, (batch, seq, heads, per_head)).astype(np.float32)
    documents = np.sort(rng.integers(0, 4, (batch, seq)), axis=1).astype(np.int32)
    documents[0, seq - seq // 5 :] = -1
    return (normal(key_dim), k, normal(per_head, value_dim), log_decay, beta), documents


@pytest.mark.few(seq=(7, 150))
@pytest.mark.parametrize("seq", [1, 7, 64, 150])
def test_outputs_and_gradients_are_those_of_the_loop(seq, rng):
    operands, documents = drawn(rng, seq)
    ct = rng.normal(size=(*documents.shape, 2, 3, 4)).astype(np.float32)

    def both(rule, *operands):
        out, back = jax.vjp(lambda *x: rule(*x, documents), *operands)
        return out, *back(jnp.asarray(ct))

    ours, exact = (jax.jit(partial(both, rule))(*operands) for rule in (gated_delta, gated_delta_reference))
    np.testing.assert_allclose(ours[0], exact[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(ours, exact, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) + 1e-6


def test_keys_that_are_all_alike_and_never_forgotten_are_as_exact(rng):
    """Powers of the triangular system, by which it could be inverted, grow to 10¹⁸ there before they vanish."""
    (q, k, v, log_decay, beta), documents = drawn(rng, 64)
    k[:], log_decay[:], beta[:] = k[0, 0, 0], 0, 1
    operands = q, k, v, log_decay, beta, np.zeros_like(documents)
    found, exact = (rule(*operands) for rule in (gated_delta, gated_delta_reference))
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def test_a_document_is_what_it_is_alone(rng):
    operands, _ = drawn(rng, 90, batch=1)
    together = gated_delta(*operands, np.repeat(np.int32([[0, 1]]), [50, 40], axis=1))
    alone = [gated_delta(*(x[:, cut] for x in operands), np.zeros((1, 1), np.int32).repeat(n, 1))
             for cut, n in ((slice(50), 50), (slice(50, None), 40))]  # fmt: skip
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=1e-4, atol=2e-5)


@pytest.mark.few(cut=(40,))
@pytest.mark.parametrize("cut", [40, 64, 130])
def test_a_run_takes_up_the_state_of_those_before_it(cut, rng):
    """Of 150 positions those from `cut` on, the first with a document that began before it, the second with another."""
    operands, documents = drawn(rng, 150)
    documents[0, cut - 1 : cut + 5], documents[1, cut:] = documents[0, cut], documents[1, cut - 1] + 1
    earlier, later = (tuple(x[:, part] for x in (*operands, documents)) for part in (slice(cut), slice(cut, None)))
    none = np.full(2, -2, np.int32)
    _, _, _, state = gated_delta_run(*earlier, none)
    out, read, transition, added = gated_delta_run(*later, documents[:, cut - 1])
    exact = gated_delta_reference(*operands, documents)
    found = out + jnp.einsum("bihrk,bhrkv->bihrv", read, state)
    np.testing.assert_allclose(found, exact[:, cut:], rtol=1e-4, atol=2e-5)
    whole = gated_delta_run(*operands, documents, none)[3]
    np.testing.assert_allclose(transition @ state + added, whole, rtol=1e-4, atol=2e-5)
    assert not np.any(read[1])
    assert not np.any(transition[1])
    assert np.any(read[0])
