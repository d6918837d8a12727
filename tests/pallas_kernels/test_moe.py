"""permute, grouped_matmul and combine against loops over experts in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from jax.extend.core import jaxprs_in_params

from pallas_kernels.moe import combine, grouped_matmul, permute
from pallas_kernels.moe.blocks import LANES, block_rows, for_each_block

IMPLEMENTATIONS = ["blocked", "ragged"]


def product_oracle(lhs, rhs, group_sizes, dout):
    """Output and both gradients, one group at a time, float64."""
    lhs, rhs, dout = (np.asarray(a, np.float64) for a in (lhs, rhs, dout))
    out, dlhs, drhs = np.zeros((len(lhs), rhs.shape[2])), np.zeros_like(lhs), np.zeros_like(rhs)
    end = 0
    for group, size in enumerate(group_sizes):
        rows = slice(end, end + size)
        end += size
        out[rows] = lhs[rows] @ rhs[group]
        dlhs[rows] = dout[rows] @ rhs[group].T
        drhs[group] = lhs[rows].T @ dout[rows]
    return out, dlhs, drhs


def product_and_gradients(implementation):
    def run(lhs, rhs, group_sizes, dout):
        product = partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation)
        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(dout)

    return jax.jit(run)


def random_product(rng, rows, inner, outer, groups):
    lhs, rhs = rng.normal(size=(rows, inner)), rng.normal(size=(groups, inner, outer))
    return [a.astype(np.float32) for a in (lhs, rhs, rng.normal(size=(rows, outer)))]


# rows, inner, outer; sizes that share a program (the block sizes are 16, 128 and, for one row, 1)
PRODUCTS = {
    "odd": (37, 5, 7, [[8, 9, 3, 16, 1], [0, 0, 37, 0, 0], [37, 0, 0, 0, 0], [0, 17, 0, 3, 0], [0] * 5]),
    "long": (300, 8, 6, [[130, 170], [300, 0], [0, 300], [1, 299], [0, 17], [128, 128]]),
    "one row": (1, 3, 2, [[0, 1, 0], [1, 0, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PRODUCTS)
def test_product_equals_a_loop_over_groups_and_ignores_the_tail(case, implementation):
    rows, inner, outer, all_sizes = PRODUCTS[case]
    run = product_and_gradients(implementation)
    for sizes in all_sizes:
        lhs, rhs, dout = random_product(np.random.default_rng(0), rows, inner, outer, len(sizes))
        expected = product_oracle(lhs, rhs, sizes, dout)
        lhs[sum(sizes) :] = dout[sum(sizes) :] = np.nan
        actual = run(lhs, rhs, np.array(sizes, np.int32), dout)
        for name, a, e in zip(("out", "dlhs", "drhs"), actual, expected, strict=True):
            assert_close(a, e, 2e-6, f"{case} {sizes} {name}")
        out, dlhs, drhs = map(np.asarray, actual)
        assert (out[sum(sizes) :] == 0).all() and (dlhs[sum(sizes) :] == 0).all()
        assert (drhs[np.array(sizes) == 0] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weight_gradients_of_empty_groups_are_zero_and_others_count_their_rows(implementation, dtype):
    """faults.md O07: all-ones rows, loss = sum of outputs."""
    run = product_and_gradients(implementation)
    lhs, rhs = jnp.ones((16, 64), dtype), jnp.full((4, 64, 32), 0.5, dtype)
    for sizes in ([8, 0, 8, 0], [0, 0, 0, 16], [16, 0, 0, 0], [1, 0, 14, 1], [0, 0, 0, 0]):
        out, dlhs, drhs = run(lhs, rhs, np.array(sizes, np.int32), jnp.ones((16, 32), dtype))
        np.testing.assert_array_equal(drhs, np.ones((1, 64, 32)) * np.array(sizes)[:, None, None])
        np.testing.assert_array_equal(dlhs, np.ones((1, 64)) * np.where(np.arange(16) < sum(sizes), 16, 0)[:, None])
        assert out.dtype == dlhs.dtype == drhs.dtype == dtype


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bf16_accumulates_in_fp32(implementation):
    """600 rows of ones: a bf16 sum would stop at 256. Random values: within bf16's rounding of the output."""
    run = product_and_gradients(implementation)
    ones = jnp.ones((600, 600), jnp.bfloat16)
    out, dlhs, drhs = run(ones, jnp.ones((1, 600, 8), jnp.bfloat16), np.array([600], np.int32), ones[:, :8])
    assert (out == 600).all() and (dlhs == 8).all() and (drhs == 600).all()
    random = random_product(np.random.default_rng(1), 600, 600, 8, 1)
    lhs, rhs, dout = (a.astype(jnp.bfloat16) for a in random)
    expected = product_oracle(lhs, rhs, [600], dout)
    for actual, e in zip(run(lhs, rhs, np.array([600], np.int32), dout), expected, strict=True):
        assert np.sqrt(np.mean((np.asarray(actual, np.float64) - e) ** 2) / np.mean(e**2)) < 3e-3


@pytest.mark.parametrize("sizes", [[512] * 16, [8192] + [0] * 15, [3, 0, 5] + [0] * 13, [7] * 15 + [300], [0] * 16])
def test_steps_follow_the_active_rows(sizes):
    """Every row is owned once, and no more steps are taken than the rows of pairs of groups of like size ask for."""
    rows = 8192
    block = block_rows(rows, len(sizes))
    assert 64 <= block <= 160

    def body(at, _, carry, sums):
        steps, owned = carry
        ones = jnp.where(at.owned, at.take(owned) + 1, 0)
        return (steps + 1, at.put(owned, ones)), sums

    empty = jnp.int32(0), jnp.zeros(rows, jnp.int32)
    steps, owned = for_each_block(jnp.array(sizes, jnp.int32), rows, lambda groups: groups, body, empty)
    np.testing.assert_array_equal(owned, np.arange(rows) < sum(sizes))
    longest = sorted(sizes, reverse=True)[::LANES]
    assert int(steps) == sum(-(-size // block) for size in longest)


@pytest.mark.parametrize("rows, groups", [(1, 1), (1, 9), (5, 2), (128, 1), (4096, 1), (16384, 64), (14336, 896)])
def test_balanced_groups_fill_their_blocks(rows, groups):
    """A group two standard deviations above the mean leaves less than one row in eight of its blocks unused."""
    block, likely = block_rows(rows, groups), rows / groups + 2 * (rows / groups) ** 0.5
    assert 1 <= block <= rows
    assert block == rows or -(-likely // block) * block <= likely * 9 / 8 + 8


def test_no_rows_and_bad_shapes():
    no_rows = partial(grouped_matmul, jnp.ones((0, 4)), group_sizes=jnp.zeros(2, jnp.int32))
    out, pull = jax.vjp(no_rows, jnp.ones((2, 4, 3)))
    assert out.shape == (0, 3) and (pull(out)[0] == 0).all()
    lhs, rhs, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([2, 3])
    for bad in ((lhs[:, :3], rhs, sizes), (lhs, rhs, sizes[:1]), (lhs.astype(jnp.bfloat16), rhs, sizes)):
        with pytest.raises(ValueError, match="grouped_matmul"):
            grouped_matmul(*bad)
    with pytest.raises(ValueError, match="'fast'"):
        grouped_matmul(lhs, rhs, sizes, implementation="fast")


def routing(rng, tokens, experts, k):
    """Distinct experts per token, some tokens routed nowhere (by various ids that mean it), and weights."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    for token, nowhere in zip((0, tokens // 2, tokens - 1), (experts, -1, experts + 3), strict=True):
        ids[token] = nowhere
    ids[1, 0] = experts  # one choice of a routed token
    return ids, rng.random((tokens, k)).astype(np.float32)


def test_permute_sorts_by_expert_and_combine_undoes_it():
    rng = np.random.default_rng(2)
    tokens, experts, k, latent = 23, 6, 3, 4
    ids, weights = routing(rng, tokens, experts, k)
    ids[ids == 4] = 2  # expert 4 gets nothing, and some tokens visit expert 2 twice
    routed = (ids >= 0) & (ids < experts)
    x = rng.normal(size=(tokens, latent)).astype(np.float32)
    x[~routed.any(1)] = np.nan
    weights[~routed] = np.nan
    permuted = jax.jit(partial(permute, num_experts=experts))
    rows, group_sizes, plan = permuted(x, ids, weights)
    expected = [x[t] for e in range(experts) for t in range(tokens) for j in range(k) if ids[t, j] == e]
    np.testing.assert_array_equal(rows[: len(expected)], np.array(expected))
    assert (rows[len(expected) :] == 0).all() and rows.shape == (tokens * k, latent)
    np.testing.assert_array_equal(group_sizes, [(ids == e).sum() for e in range(experts)])
    assert group_sizes.dtype == jnp.int32 and group_sizes[4] == 0

    drows = rng.normal(size=rows.shape).astype(np.float32)
    drows[len(expected) :] = np.nan
    y, pull = jax.vjp(lambda r, w: combine(r, plan._replace(weights=w)), jnp.array(drows), jnp.array(weights))
    dy = rng.normal(size=y.shape).astype(np.float32)
    dy[~routed.any(1)] = np.nan
    (dx,) = jax.vjp(lambda x: permuted(x, ids, weights)[0], x)[1](drows)
    order = [(t, j) for e in range(experts) for t in range(tokens) for j in range(k) if ids[t, j] == e]
    y_expected, dx_expected = np.zeros((2, tokens, latent))
    pulled_expected, dweights_expected = np.zeros(rows.shape), np.zeros(weights.shape)
    for row, (t, j) in enumerate(order):
        y_expected[t] += np.float64(weights[t, j]) * drows[row]
        dx_expected[t] += drows[row]
        pulled_expected[row] = np.float64(weights[t, j]) * dy[t]
        dweights_expected[t, j] = drows[row].astype(np.float64) @ dy[t]
    assert_close(y, y_expected, 1e-6, "y")
    assert_close(dx, dx_expected, 1e-6, "dx")
    assert_close(pull(dy)[0], pulled_expected, 1e-6, "drows")
    assert_close(pull(dy)[1], dweights_expected, 1e-6, "dweights")


@pytest.mark.parametrize("tokens, k, favourite", [(1, 1, 0), (5, 3, 2), (4, 2, 7)])
def test_all_to_one_expert_one_token_and_all_to_none(tokens, k, favourite):
    """Expert 7 is none of the three: every row is unused."""
    x = np.random.default_rng(4).normal(size=(tokens, 4)).astype(np.float32)
    weights = np.arange(1, tokens * k + 1, dtype=np.float32).reshape(tokens, k)
    rows, group_sizes, plan = permute(x, jnp.full((tokens, k), favourite), weights, num_experts=3)
    routed = favourite < 3
    np.testing.assert_array_equal(group_sizes, tokens * k * np.eye(3, dtype=int)[favourite] if routed else [0] * 3)
    np.testing.assert_array_equal(rows, routed * np.repeat(x, k, axis=0))
    assert_close(combine(rows, plan), routed * weights.sum(1, keepdims=True) * x, 1e-6, "y")


def test_no_tokens_and_bad_routing():
    ids, weights = jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2))
    rows, group_sizes, plan = permute(jnp.zeros((0, 4)), ids, weights, num_experts=3)
    assert rows.shape == (0, 4) and (group_sizes == 0).all() and combine(rows, plan).shape == (0, 4)
    x, ids, weights = jnp.ones((3, 4)), jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2))
    for bad in ((x[0], ids, weights), (x, ids[:2], weights), (x, ids, weights[:, :1]), (x, weights, weights)):
        with pytest.raises(ValueError, match="permute"):
            permute(*bad, num_experts=3)
    plan = permute(x, ids, weights, num_experts=3)[2]
    with pytest.raises(ValueError, match=r"\[6, L\] expected"):
        combine(x, plan)


def moe(x, weights, w1, w2, ids):
    rows, group_sizes, plan = permute(x, ids, weights, num_experts=len(w1))
    return combine(grouped_matmul(jnp.tanh(grouped_matmul(rows, w1, group_sizes)), w2, group_sizes), plan)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_whole_layer_equals_a_dense_loop_over_experts(dtype):
    """Forward and the gradient of every input; the oracle runs every expert on every token, in fp32."""
    rng = np.random.default_rng(3)
    tokens, experts, k = 40, 5, 2
    ids, weights = routing(rng, tokens, experts, k)
    shapes = (tokens, 6), (experts, 6, 8), (experts, 8, 6), (tokens, 6)
    x, w1, w2, dy = (jnp.array(rng.normal(size=s), jnp.float32).astype(dtype) for s in shapes)
    wide = [a.astype(jnp.float32) for a in (x, jnp.array(weights), w1, w2)]

    def dense(x, weights, w1, w2):
        y = jnp.zeros_like(x)
        for e in range(experts):
            share = jnp.sum(weights * (ids == e), axis=1, keepdims=True)
            y += share * (jnp.tanh(x @ w1[e]) @ w2[e])
        return y

    @jax.jit
    def both(x, weights, w1, w2):
        y, pull = jax.vjp(lambda *a: moe(*a, ids), x, weights, w1, w2)
        expected, pull_expected = jax.vjp(dense, *wide)
        return (y, *pull(dy)), (expected, *pull_expected(dy.astype(jnp.float32)))

    actual, expected = both(x, jnp.array(weights), w1, w2)
    for name, a, e in zip(("y", "dx", "dweights", "dw1", "dw2"), actual, expected, strict=True):
        assert_close(a, e, 3e-6 if dtype == jnp.float32 else 2e-2, name)
    assert actual[0].dtype == dtype and actual[2].dtype == jnp.float32


def equations(jaxpr) -> int:
    return sum(1 + sum(equations(sub) for sub in jaxprs_in_params(e.params)) for e in jaxpr.eqns)


def test_programs_stay_small():
    """The 93-layer train step has a budget of 80,000 equations."""
    x, ids, weights = jnp.ones((8, 4)), jnp.zeros((8, 2), jnp.int32), jnp.ones((8, 2))

    def product(lhs, rhs, dout):
        blocked = partial(grouped_matmul, group_sizes=jnp.array([3, 5]), implementation="blocked")
        return jax.vjp(blocked, lhs, rhs)[1](dout)

    def moved(x, weights, dy):
        def there_and_back(x, weights):
            rows, _, plan = permute(x, ids, weights, num_experts=3)
            return combine(rows, plan)

        return jax.vjp(there_and_back, x, weights)[1](dy)

    assert equations(jax.make_jaxpr(product)(x, jnp.ones((2, 4, 3)), jnp.ones((8, 3))).jaxpr) <= 230
    assert equations(jax.make_jaxpr(moved)(x, weights, x).jaxpr) <= 80
