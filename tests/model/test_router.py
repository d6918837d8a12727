"""Routing and balancing: published quantile steps (qb_*), O08, O10 (c), groups, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sizes
from golden_files import assert_close, golden

from k3jax.model import router


@pytest.mark.parametrize("name", ["qb_sigmoid", "qb_logits"])
def test_quantile_balancing_steps(name):
    """Selection, loads and the exact quantile of every micro-batch; the file's beta is subtracted, our bias added."""
    arrays = golden(name)
    top_k, per_step = int(arrays["k"]), int(arrays["microbatches"])
    experts = arrays["scores"].shape[-1]
    for at, scores in enumerate(arrays["scores"]):
        step = at // per_step
        beta = arrays["beta_after_step"][step - 1] if step else np.zeros(experts, np.float32)
        bias = jnp.asarray(-beta, jnp.float32)
        chosen, cutoff = router.select(jnp.asarray(scores), bias, top_k)
        np.testing.assert_array_equal(np.sort(chosen, axis=1), arrays["topk_idx_sorted"][at])
        np.testing.assert_array_equal(router.load(chosen, experts), arrays["load"][at])
        exact = router.exact_estimate(jnp.asarray(scores), cutoff, top_k)
        assert_close(-exact, arrays["beta_local"][at], 1e-6, f"micro-batch {at}")
        if name == "qb_sigmoid":  # bins cover sigmoid scores only
            counts = router.histogram(jnp.asarray(scores), cutoff, bias)
            assert (counts.sum(axis=1) == len(scores)).all()
            estimate = router.quantile_estimate(counts[None], bias[None], jnp.int32(len(scores)), top_k)[0]
            # The quantile lies between two neighbouring order statistics; bins add one width.
            required = np.sort(np.asarray(cutoff)[:, None] - scores, axis=0)
            rank = len(scores) * top_k // experts
            width = (bias.max() - bias.min() + 2) / router.BINS
            assert (estimate >= required[rank - 1] - width).all() and (estimate <= required[rank] + width).all()


def test_bias_keeps_its_bits():
    """O08: near 7 a bf16 bias would choose {2, 0}; the weights come from unbiased scores."""
    config = sizes.model(moe={"routed_experts": 4, "top_k": 2}).moe
    scores = jnp.array([[0.500, 0.495, 0.470, 0.465]])
    routing = router.route(scores, jnp.array([7.00, 7.01, 7.02, 7.03]), config)
    np.testing.assert_array_equal(routing.experts, [[1, 0]])
    np.testing.assert_allclose(routing.weights, [[0.49748744, 0.50251256]], rtol=1e-6)
    rounded = router.route(scores, jnp.array([7.00, 7.01, 7.02, 7.03], jnp.bfloat16).astype(jnp.float32), config)
    assert set(np.asarray(rounded.experts)[0]) == {2, 0}


def test_frozen_scores_balance():
    """O10 (c): worst overload 4.566 -> 0.301 -> 0.141 -> 0.102 in float64 with exact quantiles."""
    logits = np.random.default_rng(3).normal(size=(4096, 64)) + np.linspace(2, -2, 64)
    scores, top_k = jnp.asarray(1 / (1 + np.exp(-logits)), jnp.float32), 4
    bias = jnp.zeros(64)

    @jax.jit
    def step(bias):
        chosen, cutoff = router.select(scores, bias, top_k)
        load = router.load(chosen, 64)
        counts = router.histogram(scores, cutoff, bias)
        new = router.quantile_estimate(counts[None], bias[None], jnp.int32(4096), top_k)[0]
        return router.centred(new), load.max() / load.mean() - 1, counts.sum()

    found = []
    for _ in range(4):
        bias, overload, total = step(bias)
        found.append(float(overload))
        assert abs(float(bias.mean())) < 1e-6 and total == 4096 * 64
    assert found[0] == pytest.approx(4.566, abs=0.01)
    assert found[1] == pytest.approx(0.30, abs=0.03)
    assert found[2] <= 0.15 and found[3] <= 0.12


def overloads(rule, steps=30, tokens=1024, experts=32, top_k=4):
    """Worst load / mean - 1 at each step, of new tokens and experts whose logits go for a random walk."""
    rng = np.random.default_rng(8)
    offset, bias, found = np.linspace(2, -2, experts), jnp.zeros((1, experts)), []
    for _ in range(steps):
        scores = jnp.asarray(1 / (1 + np.exp(-rng.normal(size=(tokens, experts)) - offset)), jnp.float32)
        chosen, cutoff = router.select(scores, bias[0], top_k)
        load = np.bincount(np.ravel(chosen), minlength=experts)
        found.append(load.max() / load.mean() - 1)
        bias = router.centred(rule(scores, cutoff, bias, load, top_k))
        offset += 0.05 * rng.normal(size=experts)
    return np.array(found)


def test_drifting_router():
    """Quantile Balancing stays below the sign rule at every step after the fifth; bins cost it next to nothing."""

    def quantile(scores, cutoff, bias, load, top_k):
        counts = router.histogram(scores, cutoff, bias[0])
        return router.quantile_estimate(counts[None], bias, jnp.int32(len(scores)), top_k)

    def exact(scores, cutoff, bias, load, top_k):
        return router.exact_estimate(scores, cutoff, top_k)[None]

    def sign(rate):
        return lambda scores, cutoff, bias, load, top_k: router.sign_update(bias, jnp.asarray(load)[None], rate)

    found, without_bins = overloads(quantile), overloads(exact)
    for rate in (1e-3, 1e-2):
        assert (found[5:] < overloads(sign(rate))[5:]).all()
    assert found[0] > 3 and found[5:].max() < 1
    assert np.abs(found - without_bins)[5:].max() < 0.1


def test_padding_is_routed_nowhere_and_never_counted():
    config = sizes.model(moe={"routed_experts": 8, "top_k": 2}).moe
    scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (32, 8)))
    active = jnp.arange(32) < 20
    bias = jnp.linspace(-0.1, 0.1, 8)
    kept, part = router.route(scores, bias, config, active), router.route(scores[:20], bias, config)
    np.testing.assert_array_equal(router.load(kept.experts, 8), router.load(part.experts, 8))
    assert (kept.experts[20:] == 8).all()
    counted = router.histogram(scores, kept.cutoff, bias, active)
    np.testing.assert_array_equal(counted, router.histogram(scores[:20], part.cutoff, bias))
    kept_bias = router.quantile_estimate(jnp.zeros_like(counted)[None], bias[None], jnp.int32(0), 2)
    np.testing.assert_array_equal(kept_bias[0], bias)


def test_groups():
    """Groups are ranked by their two best; the best single expert may stay outside."""
    scores = jnp.array([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]])
    chosen, _ = router.select(scores, jnp.zeros(6), 2, groups=3, top_groups=1)
    np.testing.assert_array_equal(chosen, [[2, 3]])
    chosen, cutoff = router.select(scores, jnp.zeros(6), 2, groups=3, top_groups=2)
    np.testing.assert_array_equal(chosen, [[0, 2]])
    assert cutoff[0] == 0.5


def test_sign_rule():
    """O09: loads 6, 4, 2 move a zero bias to -rate, 0, +rate."""
    bias = router.sign_update(jnp.zeros((1, 3)), jnp.array([[6, 4, 2]]), 1e-3)
    np.testing.assert_allclose(bias, [[-1e-3, 0, 1e-3]], atol=1e-9)
