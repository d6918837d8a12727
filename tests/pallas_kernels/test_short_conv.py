"""short_conv against a loop over documents and taps in float64, gradients by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close

from pallas_kernels.kda import short_conv

CHANNELS, LENGTH = 5, 14
SEGMENT_IDS = np.int32([
    [0, 0, 3, 3, 0, 3, 0, 0, 3, 3, 9, 4, 4, 0],  # padding before, inside and after; a document of one token
    [1] * 14,
    [0] * 14,
    [2, 2, 5, 5, 5, 5, 5, 0, 0, 0, 0, 5, 5, 5],
    [6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
])  # fmt: skip
LEFT_IDS = np.int32([[3, 0, 3], [0, 1, 1], [7, 7, 7], [8, 2, 2], [8, 8, 8]])
ROWS = len(SEGMENT_IDS)


@functools.cache
def arrays(seed=0):
    """x, weight, left, gradients of y and tail."""
    rng = np.random.default_rng(seed)
    shapes = (ROWS, LENGTH, CHANNELS), (4, CHANNELS), (ROWS, 3, CHANNELS)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in (*shapes, shapes[0], shapes[2]))


def oracle(x, weight, left, d_y, d_tail, ids, left_ids):
    """y, tail and the gradients of x, weight, left, float64: the tokens of a document in a list, tap by tap."""
    x, weight, left, d_y, d_tail = (np.asarray(a, np.float64) for a in (x, weight, left, d_y, d_tail))
    tokens, ids = np.concatenate([left, x], 1), np.concatenate([left_ids, ids], 1)
    y, tail, d_tokens, d_weight = np.zeros_like(tokens), np.zeros_like(left), np.zeros_like(tokens), weight * 0
    d_y = np.concatenate([left * 0, d_y], 1)
    for row in range(len(x)):
        for i in set(ids[row]) - {0}:
            at = np.flatnonzero(ids[row] == i)
            for n, t in enumerate(at):
                for j in range(min(n, 3) + 1):
                    y[row, t] += weight[3 - j] * tokens[row, at[n - j]]
                    d_tokens[row, at[n - j]] += weight[3 - j] * d_y[row, t]
                    d_weight[3 - j] += tokens[row, at[n - j]] * d_y[row, t]
        present = np.flatnonzero(ids[row])
        if len(present):
            last = np.flatnonzero(ids[row] == ids[row, present[-1]])[-3:]
            tail[row, 3 - len(last) :] = tokens[row, last]
            d_tokens[row, last] += d_tail[row, 3 - len(last) :]
    return y[:, 3:], tail, d_tokens[:, 3:], d_weight, d_tokens[:, :3]


@functools.partial(jax.jit, static_argnames="has_left")
def run(x, weight, left, d_y, d_tail, ids=None, left_ids=None, has_left=True):
    """y, tail and the gradients of x, weight and (where it is used) left."""

    def call(x, weight, left):
        left = left if has_left else None
        return short_conv(x, weight, segment_ids=ids, left=left, left_segment_ids=left_ids)

    results, pull_back = jax.vjp(call, x, weight, left)
    return *results, *pull_back((d_y, d_tail))


def assert_all_close(actual, expected):
    for name, a, b in zip(("y", "tail", "d x", "d weight", "d left"), actual, expected, strict=True):
        assert_close(a, b, 1e-6, name)


NO_LEFT = np.zeros_like(LEFT_IDS)
WHOLE = np.ones_like(SEGMENT_IDS)
# What is handed over -> the ids that it means.
CASES = {
    "plain": (None, False, None, WHOLE, NO_LEFT),
    "plain with left": (None, True, None, WHOLE, np.ones_like(LEFT_IDS)),
    "documents": (SEGMENT_IDS, False, None, SEGMENT_IDS, NO_LEFT),
    "left of the first document": (
        SEGMENT_IDS, True, None, SEGMENT_IDS, np.repeat(np.int32([[3], [1], [1], [2], [6]]), 3, 1)
    ),
    "left with documents": (SEGMENT_IDS, True, LEFT_IDS, SEGMENT_IDS, LEFT_IDS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop(case):
    """Padding holds NaN in x, left and the gradient of y."""
    given_ids, has_left, given_left_ids, ids, left_ids = CASES[case]
    x, weight, left, d_y, d_tail = arrays()
    expected = oracle(x, weight, left, d_y, d_tail, ids, left_ids)
    x, left, d_y = x.copy(), left.copy(), d_y.copy()
    x[ids == 0], d_y[ids == 0] = np.nan, np.nan
    if has_left:
        left[left_ids == 0] = np.nan
    actual = run(x, weight, left, d_y, d_tail, given_ids, given_left_ids, has_left=has_left)
    assert_all_close(actual, expected)
    assert (actual[0][ids == 0] == 0).all() and (actual[2][ids == 0] == 0).all()


def test_weights_by_hand():
    """weight[3] meets the current token, weight[0] the one three before it."""
    x = np.float32([[[1], [10], [100], [1000], [10000]]])
    y, tail = short_conv(x, np.float32([[4], [3], [2], [1]]))
    np.testing.assert_array_equal(y[0, :, 0], [1, 12, 123, 1234, 12340])
    np.testing.assert_array_equal(tail[0, :, 0], [100, 1000, 10000])


@pytest.mark.parametrize("pieces", [[1] * LENGTH, [0, 2, 5, 0, 7]])
def test_pieces_join(pieces):
    """The tail and its ids are what the next piece needs, as in decoding."""
    x, weight, *_ = arrays()
    call = jax.jit(short_conv)
    whole, whole_tail = call(x, weight, segment_ids=SEGMENT_IDS)
    tail, tail_ids, start = np.zeros((ROWS, 3, CHANNELS), np.float32), NO_LEFT, 0
    for size in pieces:
        part, ids = x[:, start : start + size], SEGMENT_IDS[:, start : start + size]
        y, tail = call(part, weight, segment_ids=ids, left=tail, left_segment_ids=tail_ids)
        np.testing.assert_allclose(y, whole[:, start : start + size], rtol=1e-6, atol=1e-6)
        start += size
        # The tail is of the last document so far; a fourth id from the end would be one token too many.
        last = [next((i for i in row[:start][::-1] if i), 0) for row in SEGMENT_IDS]
        tail_ids = np.repeat(np.int32(last)[:, None], 3, 1)
    np.testing.assert_array_equal(tail, whole_tail)


def test_later_tokens_change_no_bit():
    x, weight, *_ = arrays()
    call = jax.jit(short_conv)
    edited, ids = x.copy(), SEGMENT_IDS.copy()
    edited[:, 6:], ids[:, 6:] = np.inf, np.where(ids[:, 6:] == 3, 77, ids[:, 6:])
    y, _ = call(x, weight, segment_ids=SEGMENT_IDS)
    other, _ = call(edited, weight, segment_ids=ids)
    np.testing.assert_array_equal(other[:, :6], y[:, :6])
    np.testing.assert_array_equal(call(edited, weight)[0][:, :6], call(x, weight)[0][:, :6])


def test_half_precision_is_summed_in_fp32():
    x, weight, _, d_y, _ = arrays()
    x, weight, d_y = (jnp.asarray(a, jnp.bfloat16) for a in (x, weight, d_y))
    zero_left = jnp.zeros((ROWS, 3, CHANNELS), jnp.bfloat16)
    for ids in (None, SEGMENT_IDS):
        actual = run(x, weight, zero_left, d_y, zero_left, ids)
        assert all(a.dtype == jnp.bfloat16 for a in actual)
        given = WHOLE if ids is None else ids
        expected = oracle(x, weight, zero_left, d_y, zero_left, given, NO_LEFT)
        for a, b in zip(actual[:4], expected[:4], strict=True):
            assert_close(np.asarray(a, np.float32), b, 2**-8, "half precision")  # one rounding of the sum


def test_empty():
    x, weight, left, *_ = arrays()
    for ids in (None, SEGMENT_IDS[:, :0]):
        y, tail = jax.jit(short_conv)(x[:, :0], weight, segment_ids=ids, left=left)
        assert y.shape == (ROWS, 0, CHANNELS)
        np.testing.assert_array_equal(tail, left)


def test_wrong_arguments():
    x, weight, left, *_ = arrays()
    with pytest.raises(ValueError, match=r"x has shape \(5, 14\)"):
        short_conv(x[..., 0], weight)
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\), expected \(4, 5\) beside x \(5, 14, 5\)"):
        short_conv(x, weight.T)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(5, 13\), expected \(5, 14\)"):
        short_conv(x, weight, segment_ids=SEGMENT_IDS[:, 1:])
    with pytest.raises(ValueError, match=r"left has shape \(5, 2, 5\), expected \(5, 3, 5\)"):
        short_conv(x, weight, left=left[:, 1:])
    with pytest.raises(ValueError, match="segment_ids are float32"):
        short_conv(x, weight, segment_ids=SEGMENT_IDS.astype(np.float32))
    with pytest.raises(ValueError, match="need segment_ids and left"):
        short_conv(x, weight, segment_ids=SEGMENT_IDS, left_segment_ids=LEFT_IDS)
