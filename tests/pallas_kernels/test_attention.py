"""mla_attention against softmax attention in float64 numpy, document by document, gradients by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from pallas_kernels.attention import mla_attention, xla

HEADS, OWN, SHARED, VALUE = 3, 6, 4, 5
NAMES = "output", "row_max", "dquery", "dkey", "dkey_shared", "dvalue"


def inputs(length, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    lead = batch, length
    shapes = (*lead, HEADS, OWN + SHARED), (*lead, HEADS, OWN), (*lead, SHARED), (*lead, HEADS, VALUE)
    return [rng.normal(size=s).astype(np.float32) for s in (*shapes, shapes[3])]


def oracle(query, key, key_shared, value, doutput, segment_ids, scale):
    """The six arrays of NAMES, one document and one head at a time."""
    query, key, key_shared, value, doutput = (
        np.asarray(a, np.float64) for a in (query, key, key_shared, value, doutput)
    )
    batch, length = query.shape[:2]
    output, row_max = np.zeros_like(value), np.full((batch, HEADS, length), -np.inf)
    dquery, dkey, dshared, dvalue = (np.zeros_like(a) for a in (query, key, key_shared, value))
    for b, h in np.ndindex(batch, HEADS):
        for document in set(segment_ids[b]) - {0}:
            at = np.flatnonzero(segment_ids[b] == document)
            k, q, v, do = (
                np.c_[key[b, at, h], key_shared[b, at]],
                query[b, at, h],
                value[b, at, h],
                doutput[b, at, h],
            )
            logits = np.where(np.tri(len(at), dtype=bool), scale * q @ k.T, -np.inf)
            row_max[b, h, at] = logits.max(1)
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            output[b, at, h] = p @ v
            dp = do @ v.T
            dlogits = scale * p * (dp - (p * dp).sum(1, keepdims=True))
            dquery[b, at, h], dvalue[b, at, h] = dlogits @ k, p.T @ do
            dk = dlogits.T @ q
            dkey[b, at, h] = dk[:, :OWN]
            dshared[b, at] += dk[:, OWN:]
    return output, row_max, dquery, dkey, dshared, dvalue


def run(arrays, segment_ids=None, chunk=None, **options):
    """The same six arrays; `chunk` cuts the queries into pieces smaller than the module's own."""

    @jax.jit
    def forward_and_gradients(*arrays):
        def attention(*arrays):
            if chunk is None:
                return mla_attention(*arrays, segment_ids=segment_ids, **options)
            return xla.attention(*arrays, segment_ids, (OWN + SHARED) ** -0.5, chunk)

        (output, row_max), pull = jax.vjp(attention, *arrays[:4])
        # row_max carries no gradient: what comes back to it must not matter.
        return output, row_max, *pull((arrays[4], jnp.ones_like(row_max)))

    return [np.asarray(a, np.float64) for a in forward_and_gradients(*arrays)]


def check(actual, expected, tolerances):
    for name, a, e, tolerance in zip(NAMES, actual, expected, tolerances, strict=True):
        seen = e > -np.inf
        np.testing.assert_array_equal(a > -np.inf, seen, name)
        assert_close(np.where(seen, a, 0), np.where(seen, e, 0), tolerance, name)


FP32 = (1e-6, 1e-6, 3e-6, 3e-6, 3e-6, 3e-6)


@pytest.mark.parametrize("length, chunk", [(1, None), (2, None), (17, None), (64, 32), (130, None), (130, 64)])
def test_one_document(length, chunk):
    arrays = inputs(length)
    expected = oracle(*arrays, np.ones((2, length), int), 10**-0.5)
    check(run(arrays, chunk=chunk), expected, FP32)


def packed(length):
    """Documents of various lengths; padding at the end, at the start, between documents, and a row of it."""
    rows = np.zeros((3, length), np.int32)
    rows[0, : length // 3], rows[0, length // 3 : length - 5] = 7, 3
    rows[1, 4 : length // 2], rows[1, length // 2 + 9 :] = 1, 2
    rows[1, length // 2 + 3 : length // 2 + 4] = 9
    return rows


@pytest.mark.parametrize("length, chunk", [(40, None), (130, 64)])
def test_documents_are_alone_and_padding_may_hold_nan(length, chunk):
    segment_ids = packed(length)
    arrays = inputs(length, batch=3)
    expected = oracle(*arrays, segment_ids, 10**-0.5)
    for array in arrays:
        array[segment_ids == 0] = np.nan
    actual = run(arrays, segment_ids, chunk)
    check(actual, expected, FP32)
    for array in (actual[0], *actual[2:]):
        assert (array[segment_ids == 0] == 0).all()


def test_no_tokens():
    output, row_max, *gradients = run(inputs(0))
    assert output.shape == (2, 0, HEADS, VALUE) and row_max.shape == (2, HEADS, 0)
    assert [g.shape for g in gradients] == [a.shape for a in inputs(0)[:4]]


def test_scale():
    arrays = inputs(9)
    check(run(arrays, scale=0.5), oracle(*arrays, np.ones((2, 9), int), 0.5), FP32)


@pytest.mark.parametrize("chunk", [None, 32])
def test_the_past_is_bitwise_independent_of_the_future(chunk):
    arrays, edited = inputs(70), inputs(70)
    for array, other in zip(edited, inputs(70, seed=1), strict=True):
        array[:, 41:] = 50 * other[:, 41:]
    for each in (arrays, edited):
        each[4][:, 41:] = 0  # a loss on the prefix
    first, second = run(arrays, chunk=chunk), run(edited, chunk=chunk)
    np.testing.assert_array_equal(first[0][:, :41], second[0][:, :41])
    np.testing.assert_array_equal(first[1][:, :, :41], second[1][:, :, :41])
    for name, a, b in zip(NAMES[2:], first[2:], second[2:], strict=True):
        np.testing.assert_array_equal(a[:, :41], b[:, :41], name)
        assert (a[:, 41:] == 0).all(), name


def test_documents_are_bitwise_independent():
    """An edit of one document leaves another document of the row and its gradients as they were."""
    segment_ids = np.repeat(np.array([[4, 9, 2]], np.int32), [12, 20, 8], axis=1)
    arrays, edited = inputs(40, batch=1), inputs(40, batch=1)
    for array, other in zip(edited, inputs(40, batch=1, seed=1), strict=True):
        array[:, 12:32] = 50 * other[:, 12:32]
    first, second = run(arrays, segment_ids), run(edited, segment_ids)
    kept = np.flatnonzero(segment_ids[0] != 9)
    for name, a, b in zip(NAMES, first, second, strict=True):
        axis = 2 if name == "row_max" else 1
        np.testing.assert_array_equal(a.take(kept, axis), b.take(kept, axis), name)
        assert not np.array_equal(a, b), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_row_max_is_exact(dtype):
    """Small integers and a scale of 1/2: every logit is exact, so the maximum must be."""
    query, key, key_shared, value, doutput = (np.round(2 * a) for a in inputs(70))
    expected = oracle(query, key, key_shared, value, doutput, packed(70)[:2], 0.5)[1]
    arrays = [jnp.asarray(a, dtype) for a in (query, key, key_shared, value, doutput)]
    for chunk in (256, 32):
        run_of = jax.jit(lambda *a, chunk=chunk: xla.attention(*a, packed(70)[:2], 0.5, chunk)[1])
        np.testing.assert_array_equal(run_of(*arrays[:4]), expected)


def test_large_logits():
    """Integers times 2^17: logits of 10^6 are exact, and what differs by less than 1 in them is 2^17 apart."""
    arrays = [np.round(2 * a) for a in inputs(20)]
    arrays[0] *= 2.0**17
    check(run(arrays, scale=0.5), oracle(*arrays, np.ones((2, 20), int), 0.5), FP32)


@pytest.mark.parametrize("chunk", [None, 32])
def test_a_value_that_overflows_later_products_stays_there(chunk):
    """1e36 times gradients of 2,000 is inf: where a query does not see the value, that must not meet a 0."""
    arrays, edited = inputs(70), inputs(70)
    edited[3][:, 41:] = 1e36
    for each in (arrays, edited):
        each[4] *= 2000
        each[4][:, 41:] = 0
    for name, a, b in zip(NAMES, run(arrays, chunk=chunk), run(edited, chunk=chunk), strict=True):
        seen = (slice(None), slice(None), slice(41)) if name == "row_max" else (slice(None), slice(41))
        np.testing.assert_array_equal(b[seen], a[seen], name)


@pytest.mark.parametrize("segment_ids", [None, packed(130)[:2]], ids=["one document", "documents and padding"])
def test_bf16(segment_ids):
    """Relative rms against fp32 mathematics on the same rounded inputs, design.md section 5."""
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in inputs(130)]
    expected = oracle(*arrays, np.ones((2, 130), int) if segment_ids is None else segment_ids, 10**-0.5)
    for name, a, e in zip(NAMES, run(arrays, segment_ids, chunk=64), expected, strict=True):
        a, e = a[e > -np.inf], e[e > -np.inf]
        error = np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2))
        assert error < {"output": 5e-3, "row_max": 1e-6}.get(name, 8e-3), f"{name}: {error:.2g}"
    output, row_max = jax.eval_shape(mla_attention, *arrays[:4])
    assert output.dtype == jnp.bfloat16 and row_max.dtype == jnp.float32


def gradient(*arrays):
    return jax.grad(lambda *a: mla_attention(*a)[0].sum(), argnums=(0, 1, 2, 3))(*arrays)


def test_memory_is_linear_and_programs_stay_small():
    def temporary(length):
        return jax.jit(gradient).lower(*inputs(length, batch=1)[:4]).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 5 * temporary(1024)

    def equations(jaxpr):
        return sum(1 + sum(map(equations, jaxprs_in_params(e.params))) for e in jaxpr.eqns)

    def packed_gradient(segment_ids, *arrays):
        return jax.vjp(lambda *a: mla_attention(*a, segment_ids=segment_ids)[0], *arrays[:4])[1](arrays[4])

    for length in (64, 600):
        arrays = jnp.ones((2, length), jnp.int32), *inputs(length)
        assert equations(jax.make_jaxpr(packed_gradient)(*arrays).jaxpr) <= 280


def test_no_array_of_all_pairs():
    """At 8,192 tokens no array of the program, forward or backward, has two axes of the length of the sequence."""
    arrays = [jax.ShapeDtypeStruct((1, 8192, *x.shape[2:]), x.dtype) for x in inputs(1)[:4]]
    text = jax.jit(gradient).lower(*arrays).compile().as_text()
    assert "8192" in text
    assert not re.search(r"\[(\d+,)*8192(,\d+)*,8192(,\d+)*\]", text)


def test_tiles_that_no_query_looks_into_are_not_computed():
    """Documents begin with chunks. The first holds NaN, which would be NaN in any product, even with weight 0."""
    segment_ids = np.repeat(np.array([[4, 9, 2]], np.int32), [32, 64, 34], axis=1)
    arrays = inputs(130, batch=1)
    expected = oracle(*arrays, segment_ids, 10**-0.5)
    for array in arrays[:4]:
        array[:, :32] = np.nan
    for name, a, e, tolerance in zip(NAMES, run(arrays, segment_ids, chunk=32), expected, FP32, strict=True):
        axis = 2 if name == "row_max" else 1
        rest = np.arange(32, 130)
        assert_close(a.take(rest, axis), e.take(rest, axis), tolerance, name)


several = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@st.composite
def layouts(draw):
    """Segment ids of a row of 70: runs of documents and of padding."""
    row, document = [], 0
    while len(row) < 70:
        document += draw(st.sampled_from([0, 1, 1]))
        row += [document * draw(st.sampled_from([0, 1, 1]))] * draw(st.integers(1, 25))
    return np.int32([row[:70]])


@functools.cache
def drawn(chunk):
    """The six results as one program for all drawn examples of 70 tokens."""

    @jax.jit
    def call(segment_ids, *arrays):
        attention = functools.partial(xla.attention, segment_ids=segment_ids, scale=0.5, chunk=chunk)
        (output, row_max), pull = jax.vjp(attention, *arrays[:4])
        return output, row_max, *pull((arrays[4], jnp.ones_like(row_max)))

    return lambda *a: [np.asarray(x, np.float64) for x in call(*a)]


@several
@given(st.integers(0, 99), layouts())
def test_any_layout(seed, segment_ids):
    """Packed is separate, and padding may hold anything: a NaN anywhere would show."""
    arrays = inputs(70, batch=1, seed=seed)
    expected = oracle(*arrays, segment_ids, 0.5)
    for array in arrays:
        array[segment_ids == 0] = np.nan
    for name, a, e in zip(NAMES, drawn(16)(segment_ids, *arrays), expected, strict=True):
        seen = e > -np.inf
        np.testing.assert_array_equal(a > -np.inf, seen, name)
        # Gradients of a document of one token vanish: what is left of terms of size 1 has their rounding.
        scale = max(np.abs(e[seen]).max(initial=0), 0.3)
        assert np.abs(a - np.where(seen, e, 0))[seen].max(initial=0) <= 1e-5 * scale, name


@several
@given(st.integers(1, 69), st.sampled_from([0.0, -3.0, 50.0, 1e4]), st.integers(0, 3))
def test_any_edit_behind_a_border_leaves_the_bits_before_it(border, content, which):
    ids = np.ones((1, 70), np.int32)
    arrays = inputs(70, batch=1)
    arrays[4][:, border:] = 0  # a loss on what stands before
    edited = [x.copy() for x in arrays]
    edited[which][:, border:] = content
    first, second = drawn(16)(ids, *arrays), drawn(16)(ids, *edited)
    np.testing.assert_array_equal(second[1][:, :, :border], first[1][:, :, :border])
    for name, a, b in zip(NAMES[::5] + NAMES[2:5], first[::5] + first[2:5], second[::5] + second[2:5], strict=True):
        np.testing.assert_array_equal(b[:, :border], a[:, :border], name)
    for name, b in zip(NAMES[2:], second[2:], strict=True):
        assert (b[:, border:] == 0).all(), name


def test_documents_are_runs():
    """An id that comes back names another document, as it does in kda."""
    arrays = inputs(40, batch=1)
    again = np.repeat(np.array([[4, 9, 4]], np.int32), [12, 20, 8], axis=1)
    apart = np.repeat(np.array([[4, 9, 5]], np.int32), [12, 20, 8], axis=1)
    check(run(arrays, again), oracle(*arrays, apart, 10**-0.5), FP32)


def test_bad_arguments():
    query, key, shared, value, _ = inputs(4)
    with pytest.raises(ValueError, match=r"channels.*\(2, 4, 3, 9\)"):
        mla_attention(query[..., 1:], key, shared, value)
    with pytest.raises(ValueError, match="batch, tokens or heads"):
        mla_attention(query, key[:, :3], shared, value)
    with pytest.raises(ValueError, match="segment_ids"):
        mla_attention(query, key, shared, value, segment_ids=jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="segment_ids are float32, expected integers"):
        mla_attention(query, key, shared, value, segment_ids=jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="'fast'"):
        mla_attention(query, key, shared, value, implementation="fast")
