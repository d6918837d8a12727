"""Causal attention with a key part that all heads share, tile by tile, by XLA.

    logit[h,t,s] = scale * query[t,h] . [key[s,h]; key_shared[s]]             s <= t, in t's document
    row_max[h,t] = max_s logit[h,t,s]
    output[t,h]  = sum_s weight[s] value[s,h] / sum_s weight[s],    weight[s] = e^(logit[h,t,s] - row_max[h,t])

Forward, a chunk of queries meets one chunk of keys after the other, from the one where its first document begins to its
own. The running maximum m, the sum l and the weighted values a are carried (online softmax, arXiv 1805.02867):

    m' = max(m, max_s logit)          w_s = e^(logit - m')
    l' = e^(m - m') l + sum_s w_s     a' = e^(m - m') a + sum_s w_s value

Backward, a chunk of keys meets the chunks of queries that see it (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    p = e^(logit - m) / l     dvalue += p^T doutput     dlogit = p (doutput . value - doutput . output)
    dkey += scale * dlogit^T query                      dquery += scale * dlogit key

with m, l and the unrounded fp32 output kept from the forward pass (K3 report, arXiv 2607.24653, 2.2). m and l are kept
apart: in m + log l the logarithm loses a digit for each that m has before the point.

Tiles are held transposed, [B,H,keys,queries]: what belongs to a query then lies along the last axis, and maxima and
sums over the keys are operations on whole rows, where CPUs reduce over a last axis ten times slower.
Invariants: memory is linear in T, and the shared part reaches the heads only within a tile; a tile that no query may
look into is not computed; logits, softmax, sums and output are fp32 until the last cast.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.segments import keep_tokens, starts
from pallas_kernels.slices import cut, pad, put

CHUNK = 256  # queries and keys of a tile
LOWEST = np.finfo(np.float32).min


class _Documents(NamedTuple):
    """What each query may see: keys from `start` to itself that are not padding. start is T for queries of padding."""

    start: Int[Array, "B T"]
    kept: Array  # [B,T] bool


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H Kn"],
    key_shared: Float[Array, "B T Ks"],
    value: Float[Array, "B T H V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """(output in value's dtype, row_max fp32); chunk is the number of queries and of keys at a time."""
    batch, length, heads, _ = query.shape
    if length == 0:
        return jnp.zeros_like(value), jnp.zeros((batch, heads, 0), jnp.float32)
    arrays = [keep_tokens(x, segment_ids) for x in (query, key, key_shared, value)]
    documents = None
    if segment_ids is not None:
        kept = segment_ids != 0
        documents = _Documents(jnp.where(kept, starts(segment_ids), length), kept)
    size = min(chunk, length)
    missing = -length % size
    if missing:  # filled up behind the last token, where no query looks
        arrays = [pad(x, missing) for x in arrays]
        if documents is not None:
            documents = _Documents(pad(documents.start, missing, length), pad(documents.kept, missing))
    output, row_max = _attention(*arrays, documents, float(scale), size)
    output, row_max = output[:, :length].astype(value.dtype), row_max[:, :, :length]
    return keep_tokens(output, segment_ids), row_max


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """[B,H,*,*] x [B,H,*,*] over one axis each (-1 or -2) -> fp32; products of fp32 are never rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((4 + a_axis,), (4 + b_axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _loop(first: Array, end: Array, chunks: int, step, carry):
    """step(chunk, carry) for the chunks first .. end - 1, without a loop where there is only one in all."""
    return step(0, carry) if chunks == 1 else lax.fori_loop(first, end, step, carry)


def _heads(x: Array, start: Array, size: int) -> Array:
    """A chunk of [B,T,H,*] as [B,H,C,*]."""
    return cut(x, start, size).swapaxes(1, 2)


def _keys(key: Array, key_shared: Array, start: Array, size: int) -> Array:
    """A chunk of keys [B,H,C,K], the shared part in every head."""
    own, shared = _heads(key, start, size), cut(key_shared, start, size)
    shared = lax.broadcast_in_dim(shared, (*own.shape[:3], shared.shape[2]), (0, 2, 3))
    return lax.concatenate([own, shared], 3)


def _logits(
    keys: Array, queries: Array, documents: _Documents | None, key_start: Array, query_start: Array, scale: float
) -> tuple[Array, Array]:
    """-> scaled logits [B,H,keys,queries] of a tile, and which of them are seen."""
    logits = scale * _dot(keys, queries, -1, -1)
    size = keys.shape[2]
    key_at = key_start + lax.broadcasted_iota(np.int32, (1, size, size), 1)
    seen = key_at <= query_start + lax.broadcasted_iota(np.int32, (1, size, size), 2)
    if documents is not None:
        begin, kept = cut(documents.start, query_start, size), cut(documents.kept, key_start, size)
        seen = seen & (key_at >= begin[:, None]) & kept[:, :, None]
    return logits, lax.broadcast_in_dim(seen, logits.shape, (0, 2, 3))


def _first_keys(documents: _Documents | None, chunks: int, size: int) -> Int[Array, "chunks"]:
    """For each chunk of queries the first chunk of keys that one of them sees; it never decreases."""
    if documents is None or chunks == 1:
        return np.zeros(chunks, np.int32)
    begin = documents.start.reshape(-1, chunks, size).min(axis=(0, 2))
    # Queries of padding say T; they look nowhere.
    begin = lax.min(lax.div(begin, np.int32(size)), np.arange(chunks, dtype=np.int32))
    return lax.cummin(begin, reverse=True)


def _at(x: Array, index: Array) -> Array:
    """x[index] of a vector."""
    return lax.squeeze(cut(x, index, 1, 0), (0,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(query, key, key_shared, value, documents, scale, size):
    """-> output [B,T,H,V] fp32, row_max [B,H,T]; T is a multiple of size."""
    output, row_max, _ = _forward(query, key, key_shared, value, documents, scale, size)
    return output, row_max


def _forward(query, key, key_shared, value, documents, scale, size):
    """-> output, row_max m, and the sums l [B,H,T]."""
    batch, length, heads, width = value.shape
    chunks = length // size
    first_keys = _first_keys(documents, chunks, size)

    def one_chunk(chunk: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        query_start = chunk * size
        queries = _heads(query, query_start, size)

        def one_tile(key_chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            largest, total, weighted = carry
            key_start = key_chunk * size
            keys, values = _keys(key, key_shared, key_start, size), _heads(value, key_start, size)
            logits, seen = _logits(keys, queries, documents, key_start, query_start, scale)
            logits = jnp.where(seen, logits, -jnp.inf)
            new = lax.max(largest, jnp.max(logits, axis=2, keepdims=True))
            # A query that has seen nothing yet has the maximum -inf: e^(-inf - lowest) = 0 is safe, e^(-inf + inf) not.
            finite = jnp.maximum(new, LOWEST)
            weights, shrink = jnp.exp(logits - finite), jnp.exp(largest - finite)
            total = shrink * total + jnp.sum(weights, axis=2, keepdims=True)
            weighted = shrink * weighted + _dot(values, weights.astype(values.dtype), -2, -2)
            return new, total, weighted

        nothing = jnp.zeros((batch, heads, 1, size))
        carry = jnp.full_like(nothing, -jnp.inf), nothing, jnp.zeros((batch, heads, width, size))
        largest, total, weighted = _loop(_at(first_keys, chunk), chunk + 1, chunks, one_tile, carry)
        total = jnp.maximum(total, np.finfo(np.float32).tiny)  # 0 where nothing is seen
        output, row_max, sums = results
        output = put(output, (weighted / total).transpose(0, 3, 1, 2), query_start)
        row_max = put(row_max, largest[:, :, 0], query_start, 2)
        return output, row_max, put(sums, total[:, :, 0], query_start, 2)

    rows = jnp.zeros((batch, heads, length))
    return _loop(0, chunks, chunks, one_chunk, (jnp.zeros(value.shape), rows, rows))


def _attention_forward(query, key, key_shared, value, documents, scale, size):
    output, row_max, sums = _forward(query, key, key_shared, value, documents, scale, size)
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = query, key, key_shared, value, documents, output, row_max, sums
    return (output, row_max), residuals


def _attention_backward(scale, size, residuals, gradients):
    query, key, key_shared, value, documents, output, row_max, sums = residuals
    d_output, _ = gradients  # the row maximum carries no gradient
    batch, length, heads, width = query.shape
    own, chunks = key.shape[3], length // size
    dots = jnp.einsum("bthv,bthv->bht", d_output, output, precision="highest")
    # A chunk of keys meets the chunks of queries whose first keys are at or before it; they end with a last one.
    first_keys = _first_keys(documents, chunks, size)[None] <= np.arange(chunks)[:, None]
    end_queries = first_keys.sum(axis=1, dtype=np.int32)

    def rows(x: Array, start: Array) -> Array:
        """A chunk of [B,H,T] as [B,H,1,C]."""
        return lax.expand_dims(cut(x, start, size, 2), (2,))

    def one_chunk(chunk: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        key_start = chunk * size
        keys, values = _keys(key, key_shared, key_start, size), _heads(value, key_start, size)

        def one_tile(query_chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_keys, d_values, d_query = carry
            query_start = query_chunk * size
            queries = _heads(query, query_start, size)
            d_part = _heads(d_output, query_start, size).astype(value.dtype)
            logits, seen = _logits(keys, queries, documents, key_start, query_start, scale)
            weights = jnp.exp(logits - rows(row_max, query_start)) / rows(sums, query_start)
            weights = jnp.where(seen, weights, 0)
            d_logits = weights * (_dot(values, d_part, -1, -1) - rows(dots, query_start))
            # What is not seen may be so large that its product overflows, and 0 * inf is not 0.
            d_logits = jnp.where(seen, d_logits, 0).astype(query.dtype)
            d_values = d_values + _dot(weights.astype(value.dtype), d_part, -1, -2)
            d_keys = d_keys + _dot(d_logits, queries, -1, -2)
            d_queries = cut(d_query, query_start, size, 2) + _dot(d_logits, keys, -2, -2)
            return d_keys, d_values, put(d_query, d_queries, query_start, 2)

        d_key, d_shared, d_value, d_query = results
        carry = jnp.zeros(keys.shape), jnp.zeros(values.shape), d_query
        d_keys, d_values, d_query = _loop(chunk, _at(end_queries, chunk), chunks, one_tile, carry)
        d_keys = scale * d_keys
        d_key = put(d_key, d_keys[..., :own].swapaxes(1, 2), key_start)
        d_shared = put(d_shared, d_keys[..., own:].sum(axis=1), key_start)
        return d_key, d_shared, put(d_value, d_values.swapaxes(1, 2), key_start), d_query

    zeros = [jnp.zeros_like(x) for x in (key, key_shared, value)]
    zeros += [jnp.zeros((batch, heads, length, width))]
    d_key, d_shared, d_value, d_query = _loop(0, chunks, chunks, one_chunk, tuple(zeros))
    d_query = (scale * d_query).swapaxes(1, 2).astype(query.dtype)
    return d_query, d_key, d_shared, d_value, None


_attention.defvjp(_attention_forward, _attention_backward)
