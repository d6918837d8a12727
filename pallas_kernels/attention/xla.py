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

Of a part of the sequence (`query_start`) the queries stand at query_start, query_start + 1, ... among the keys. Keys
behind the last query are padding to it, and the loops over chunks of keys end with the one that it stands in.

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
    """What each query may see: keys from `start` to itself that are not padding. start is Tk for queries of padding."""

    start: Int[Array, "B Tq"]
    kept: Array  # [B,Tk] bool
    query_start: Int[Array, ""] | None  # the first query's position among the keys; None: queries and keys are one


class _Tile(NamedTuple):
    """Queries and keys of a tile, and how many queries there are without what fills the last tile up."""

    queries: int
    keys: int
    length: int


def attention(
    query: Float[Array, "B Tq H K"],
    key: Float[Array, "B Tk H Kn"],
    key_shared: Float[Array, "B Tk Ks"],
    value: Float[Array, "B Tk H V"],
    segment_ids: Int[Array, "B Tk"] | None,
    scale: float,
    chunk: int = CHUNK,
    query_start: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B Tq H V"], Float[Array, "B H Tq"]]:
    """(output in value's dtype, row_max fp32); chunk is the number of queries and of keys at a time."""
    batch, length, heads, _ = query.shape
    total, width = key.shape[1], value.shape[3]
    if length == 0:
        return jnp.zeros((batch, 0, heads, width), value.dtype), jnp.zeros((batch, heads, 0), jnp.float32)
    key_ids, query_ids = part_ids(segment_ids, query_start, length, key)
    query = keep_tokens(query, query_ids)
    arrays = [keep_tokens(x, key_ids) for x in (key, key_shared, value)]
    documents = None
    if key_ids is not None:
        kept = key_ids != 0
        start = jnp.where(kept, starts(key_ids), total)
        start = start if query_start is None else cut(start, query_start, length)
        documents = _Documents(start, kept, query_start)
    tile = _Tile(min(chunk, length), min(chunk, total), length)
    missing, missing_keys = -length % tile.queries, -total % tile.keys
    # Filled up behind the last token, where no query looks.
    if missing:
        query = pad(query, missing)
    if missing_keys:
        arrays = [pad(x, missing_keys) for x in arrays]
    if documents is not None and (missing or missing_keys):
        start, kept = pad(documents.start, missing, total), pad(documents.kept, missing_keys)
        documents = _Documents(start, kept, query_start)
    output, row_max = _attention(query, *arrays, documents, float(scale), tile)
    output, row_max = output[:, :length].astype(value.dtype), row_max[:, :, :length]
    return keep_tokens(output, query_ids), row_max


def part_ids(
    segment_ids: Int[Array, "B Tk"] | None, query_start: Int[Array, ""] | None, queries: int, key: Array
) -> tuple[Int[Array, "B Tk"] | None, Int[Array, "B Tq"] | None]:
    """The segment ids of the keys, 0 behind the last query, and those of the queries."""
    if query_start is None:
        return segment_ids, segment_ids
    seen = lax.broadcasted_iota(np.int32, key.shape[:2], 1) < query_start + np.int32(queries)
    key_ids = seen.astype(np.int32) if segment_ids is None else jnp.where(seen, segment_ids, 0)
    return key_ids, cut(key_ids, query_start, queries)


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
    keys: Array, queries: Array, documents: _Documents | None, key_from: Array, query_from: Array, scale: float
) -> tuple[Array, Array]:
    """-> scaled logits [B,H,keys,queries] of a tile, and which of them are seen."""
    logits = scale * _dot(keys, queries, -1, -1)
    tile = 1, keys.shape[2], queries.shape[2]
    key_at = key_from + lax.broadcasted_iota(np.int32, tile, 1)
    query_at = query_from
    if documents is not None and documents.query_start is not None:
        query_at = documents.query_start + query_from
    seen = key_at <= query_at + lax.broadcasted_iota(np.int32, tile, 2)
    if documents is not None:
        begin, kept = cut(documents.start, query_from, tile[2]), cut(documents.kept, key_from, tile[1])
        seen = seen & (key_at >= begin[:, None]) & kept[:, :, None]
    return logits, lax.broadcast_in_dim(seen, logits.shape, (0, 2, 3))


def _last_keys(documents: _Documents | None, chunk: Array, tile: _Tile) -> Int[Array, "..."]:
    """The chunk of keys in which the last query of a chunk of queries stands."""
    if documents is None or documents.query_start is None:
        return chunk
    end = documents.query_start + jnp.minimum((chunk + 1) * tile.queries, tile.length)
    return lax.div(end - 1, np.int32(tile.keys))


def _first_queries(documents: _Documents | None, chunk: Array, tile: _Tile) -> Int[Array, ""]:
    """The first chunk of queries that stands at or behind the first key of a chunk of keys."""
    if documents is None or documents.query_start is None:
        return chunk
    return lax.div(jnp.maximum(chunk * tile.keys - documents.query_start, 0), np.int32(tile.queries))


def _first_keys(documents: _Documents | None, chunks: int, key_chunks: int, tile: _Tile) -> Int[Array, "chunks"]:
    """For each chunk of queries the first chunk of keys that one of them sees; it never decreases."""
    if documents is None or key_chunks == 1:
        return np.zeros(chunks, np.int32)
    begin = documents.start.reshape(-1, chunks, tile.queries).min(axis=(0, 2))
    # Queries of padding say Tk; they look nowhere.
    last = _last_keys(documents, np.arange(chunks, dtype=np.int32), tile)
    begin = lax.min(lax.div(begin, np.int32(tile.keys)), last)
    return lax.cummin(begin, reverse=True)


def _at(x: Array, index: Array) -> Array:
    """x[index] of a vector."""
    return lax.squeeze(cut(x, index, 1, 0), (0,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(query, key, key_shared, value, documents, scale, tile):
    """-> output [B,Tq,H,V] fp32, row_max [B,H,Tq]; queries and keys come in whole tiles."""
    output, row_max, _ = _forward(query, key, key_shared, value, documents, scale, tile)
    return output, row_max


def _forward(query, key, key_shared, value, documents, scale, tile):
    """-> output, row_max m, and the sums l [B,H,Tq]."""
    (batch, length, heads, _), width = query.shape, value.shape[3]
    chunks, key_chunks = length // tile.queries, key.shape[1] // tile.keys
    first_keys = _first_keys(documents, chunks, key_chunks, tile)

    def one_chunk(chunk: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        query_from = chunk * tile.queries
        queries = _heads(query, query_from, tile.queries)

        def one_tile(key_chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            largest, total, weighted = carry
            key_from = key_chunk * tile.keys
            keys, values = _keys(key, key_shared, key_from, tile.keys), _heads(value, key_from, tile.keys)
            logits, seen = _logits(keys, queries, documents, key_from, query_from, scale)
            logits = jnp.where(seen, logits, -jnp.inf)
            new = lax.max(largest, jnp.max(logits, axis=2, keepdims=True))
            # A query that has seen nothing yet has the maximum -inf: e^(-inf - lowest) = 0 is safe, e^(-inf + inf) not.
            finite = jnp.maximum(new, LOWEST)
            weights, shrink = jnp.exp(logits - finite), jnp.exp(largest - finite)
            total = shrink * total + jnp.sum(weights, axis=2, keepdims=True)
            weighted = shrink * weighted + _dot(values, weights.astype(values.dtype), -2, -2)
            return new, total, weighted

        nothing = jnp.zeros((batch, heads, 1, tile.queries))
        carry = jnp.full_like(nothing, -jnp.inf), nothing, jnp.zeros((batch, heads, width, tile.queries))
        first, end = _at(first_keys, chunk), _last_keys(documents, chunk, tile) + 1
        largest, total, weighted = _loop(first, end, key_chunks, one_tile, carry)
        total = jnp.maximum(total, np.finfo(np.float32).tiny)  # 0 where nothing is seen
        output, row_max, sums = results
        output = put(output, (weighted / total).transpose(0, 3, 1, 2), query_from)
        row_max = put(row_max, largest[:, :, 0], query_from, 2)
        return output, row_max, put(sums, total[:, :, 0], query_from, 2)

    rows = jnp.zeros((batch, heads, length))
    return _loop(0, chunks, chunks, one_chunk, (jnp.zeros((batch, length, heads, width)), rows, rows))


def _attention_forward(query, key, key_shared, value, documents, scale, tile):
    output, row_max, sums = _forward(query, key, key_shared, value, documents, scale, tile)
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = query, key, key_shared, value, documents, output, row_max, sums
    return (output, row_max), residuals


def _attention_backward(scale, tile, residuals, gradients):
    query, key, key_shared, value, documents, output, row_max, sums = residuals
    d_output, _ = gradients  # the row maximum carries no gradient
    batch, length, heads, width = query.shape
    own, chunks, key_chunks = key.shape[3], length // tile.queries, key.shape[1] // tile.keys
    dots = jnp.einsum("bthv,bthv->bht", d_output, output, precision="highest")
    # A chunk of keys meets the chunks of queries whose first keys are at or before it; they end with a last one.
    first_keys = _first_keys(documents, chunks, key_chunks, tile)
    end_queries = (first_keys[None] <= np.arange(key_chunks)[:, None]).sum(axis=1, dtype=np.int32)

    def rows(x: Array, start: Array) -> Array:
        """A chunk of [B,H,T] as [B,H,1,C]."""
        return lax.expand_dims(cut(x, start, tile.queries, 2), (2,))

    def one_chunk(chunk: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        key_from = chunk * tile.keys
        keys, values = _keys(key, key_shared, key_from, tile.keys), _heads(value, key_from, tile.keys)

        def one_tile(query_chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_keys, d_values, d_query = carry
            query_from = query_chunk * tile.queries
            queries = _heads(query, query_from, tile.queries)
            d_part = _heads(d_output, query_from, tile.queries).astype(value.dtype)
            logits, seen = _logits(keys, queries, documents, key_from, query_from, scale)
            weights = jnp.exp(logits - rows(row_max, query_from)) / rows(sums, query_from)
            weights = jnp.where(seen, weights, 0)
            d_logits = weights * (_dot(values, d_part, -1, -1) - rows(dots, query_from))
            # What is not seen may be so large that its product overflows, and 0 * inf is not 0.
            d_logits = jnp.where(seen, d_logits, 0).astype(query.dtype)
            d_values = d_values + _dot(weights.astype(value.dtype), d_part, -1, -2)
            d_keys = d_keys + _dot(d_logits, queries, -1, -2)
            d_queries = cut(d_query, query_from, tile.queries, 2) + _dot(d_logits, keys, -2, -2)
            return d_keys, d_values, put(d_query, d_queries, query_from, 2)

        d_key, d_shared, d_value, d_query = results
        carry = jnp.zeros(keys.shape), jnp.zeros(values.shape), d_query
        first, end = _first_queries(documents, chunk, tile), _at(end_queries, chunk)
        d_keys, d_values, d_query = _loop(first, end, chunks, one_tile, carry)
        d_keys = scale * d_keys
        d_key = put(d_key, d_keys[..., :own].swapaxes(1, 2), key_from)
        d_shared = put(d_shared, d_keys[..., own:].sum(axis=1), key_from)
        return d_key, d_shared, put(d_value, d_values.swapaxes(1, 2), key_from), d_query

    zeros = [jnp.zeros_like(x) for x in (key, key_shared, value)]
    zeros += [jnp.zeros((batch, heads, length, width))]
    first, end = 0, key_chunks
    if documents is not None and documents.query_start is not None:  # no other chunk of keys is seen
        first, end = first_keys[0], _last_keys(documents, chunks - 1, tile) + 1
    d_key, d_shared, d_value, d_query = _loop(first, end, key_chunks, one_chunk, tuple(zeros))
    d_query = (scale * d_query).swapaxes(1, 2).astype(query.dtype)
    return d_query, d_key, d_shared, d_value, None


_attention.defvjp(_attention_forward, _attention_backward)
