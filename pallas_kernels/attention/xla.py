"""Causal attention with a key part that all heads share, tile by tile, by XLA.

    logit[h,t,s] = scale * query[t,h] . [key[s,h]; key_shared[s]]             s <= t, in t's document
    row_max[h,t] = max_s logit[h,t,s]
    output[t,h]  = sum_s weight[s] value[s,h] / sum_s weight[s],    weight[s] = e^(logit[h,t,s] - row_max[h,t])

Forward, a chunk of queries meets one chunk of keys after the other, from the one where its first document begins to its
own. The running maximum m, the sum l and the weighted values a are carried (online softmax, arXiv 1805.02867):

    m' = max(m, max_s logit)          w_s = e^(logit - m')
    l' = e^(m - m') l + sum_s w_s     a' = e^(m - m') a + sum_s w_s value

Backward, a chunk of keys meets the chunks of queries that see it (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    p = e^(logit - lse)     dvalue += p^T doutput     dlogit = p (doutput . value - doutput . output)
    dkey += scale * dlogit^T query                    dquery += scale * dlogit key

with lse = row_max + log l and the unrounded fp32 output kept from the forward pass (K3 report, arXiv 2607.24653, 2.2).

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

from pallas_kernels import segments

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
    arrays = query, key, key_shared, value
    documents = None
    if segment_ids is not None:
        kept = segment_ids != 0
        arrays = [_only(kept, x) for x in arrays]
        documents = _Documents(jnp.where(kept, segments.starts(segment_ids), length), kept)
    size = min(chunk, length)
    missing = -length % size
    if missing:  # filled up behind the last token, where no query looks
        arrays = [_pad(x, missing, 0) for x in arrays]
        if documents is not None:
            documents = _Documents(_pad(documents.start, missing, length), _pad(documents.kept, missing, False))
    output, row_max = _attention(*arrays, documents, float(scale), size)
    output, row_max = output[:, :length].astype(value.dtype), row_max[:, :, :length]
    return (output if segment_ids is None else _only(kept, output)), row_max


def _only(kept: Array, x: Array) -> Array:
    """x [B,T,...] with 0 in padding, forward and backward."""
    return lax.select(lax.broadcast_in_dim(kept, x.shape, (0, 1)), x, jnp.zeros_like(x))


def _pad(x: Array, count: int, content: float) -> Array:
    """x [B,T,...] with `count` more positions."""
    return lax.pad(x, np.asarray(content, x.dtype), [(0, 0, 0), (0, count, 0)] + [(0, 0, 0)] * (x.ndim - 2))


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """[B,H,*,*] x [B,H,*,*] over one axis each (-1 or -2) -> fp32; products of fp32 are never rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((4 + a_axis,), (4 + b_axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _cut(x: Array, start: Array, size: int, axis: int) -> Array:
    """x[..., start : start + size, ...] along an axis, start >= 0."""
    index, sizes = [0] * x.ndim, list(x.shape)
    index[axis], sizes[axis] = start, size
    return lax.dynamic_slice(x, index, sizes, allow_negative_indices=False)


def _put(x: Array, part: Array, start: Array, axis: int) -> Array:
    """x with `part` from `start` on along an axis."""
    index = [0] * x.ndim
    index[axis] = start
    return lax.dynamic_update_slice(x, part.astype(x.dtype), index, allow_negative_indices=False)


def _at(x: Array, index: Array) -> Array:
    """x[index] of a vector."""
    return lax.squeeze(_cut(x, index, 1, 0), (0,))


def _loop(first: Array, end: Array, chunks: int, step, carry):
    """step(chunk, carry) for the chunks first .. end - 1, without a loop where there is only one."""
    return step(0, carry) if chunks == 1 else lax.fori_loop(first, end, step, carry)


class _Tiles:
    """Cuts chunks out of the four arrays, and says what meets."""

    def __init__(self, query, key, key_shared, value, documents, scale, size):
        self.query, self.key, self.key_shared, self.value = query, key, key_shared, value
        self.documents, self.scale, self.size = documents, scale, size
        self.chunks = query.shape[1] // size

    def cut(self, x: Array, start: Array) -> Array:
        """[B,T,H,*] -> [B,H,C,*], or [B,T] -> [B,C]."""
        part = _cut(x, start, self.size, 1)
        return part.swapaxes(1, 2) if x.ndim == 4 else part

    def keys(self, start: Array) -> tuple[Array, Array]:
        """Keys [B,H,C,K], the shared part in every head, and values."""
        own = self.cut(self.key, start)
        shared = _cut(self.key_shared, start, self.size, 1)
        shared = lax.broadcast_in_dim(shared, (*own.shape[:3], shared.shape[2]), (0, 2, 3))
        return lax.concatenate([own, shared], 3), self.cut(self.value, start)

    def logits(self, keys: Array, queries: Array, key_start: Array, query_start: Array) -> tuple[Array, Array]:
        """-> scaled logits [B,H,keys,queries], and which of them are seen."""
        logits = self.scale * _dot(keys, queries, -1, -1)
        key_at = key_start + lax.broadcasted_iota(np.int32, (1, self.size, self.size), 1)
        seen = key_at <= query_start + lax.broadcasted_iota(np.int32, (1, self.size, self.size), 2)
        if self.documents is not None:
            begin = self.cut(self.documents.start, query_start)[:, None, :]
            seen = seen & (key_at >= begin) & self.cut(self.documents.kept, key_start)[:, :, None]
        return logits, lax.broadcast_in_dim(seen, logits.shape, (0, 2, 3))

    def first_keys(self) -> Array:
        """For each chunk of queries the first chunk of keys that one of them sees [chunks]; it never decreases."""
        if self.documents is None or self.chunks == 1:
            return np.zeros(self.chunks, np.int32)
        begin = self.documents.start.reshape(-1, self.chunks, self.size).min(axis=(0, 2))
        # Queries of padding say T; they look nowhere.
        begin = lax.min(lax.div(begin, np.int32(self.size)), np.arange(self.chunks, dtype=np.int32))
        return lax.cummin(begin, reverse=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(query, key, key_shared, value, documents, scale, size):
    """-> output [B,T,H,V] fp32, row_max [B,H,T]; T is a multiple of size."""
    output, row_max, _ = _forward(query, key, key_shared, value, documents, scale, size)
    return output, row_max


def _forward(query, key, key_shared, value, documents, scale, size):
    """-> output, row_max, lse."""
    tiles = _Tiles(query, key, key_shared, value, documents, scale, size)
    batch, length, heads, width = value.shape
    first_keys = tiles.first_keys()

    def one_chunk(chunk: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        query_start = chunk * size
        queries = tiles.cut(query, query_start)

        def one_tile(key_chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            largest, total, weighted = carry
            key_start = key_chunk * size
            keys, values = tiles.keys(key_start)
            logits, seen = tiles.logits(keys, queries, key_start, query_start)
            logits = jnp.where(seen, logits, -jnp.inf)
            new = lax.max(largest, jnp.max(logits, axis=2, keepdims=True))
            # A query that has seen nothing yet has the maximum -inf: e^(-inf - lowest) = 0 is safe, e^(-inf + inf) not.
            finite = jnp.maximum(new, LOWEST)
            weights, kept = jnp.exp(logits - finite), jnp.exp(largest - finite)
            total = kept * total + jnp.sum(weights, axis=2, keepdims=True)
            weighted = kept * weighted + _dot(values, weights.astype(values.dtype), -2, -2)
            return new, total, weighted

        shape = batch, heads, 1, size
        carry = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((batch, heads, width, size))
        first = _at(first_keys, chunk)
        largest, total, weighted = _loop(first, chunk + 1, tiles.chunks, one_tile, carry)
        total = jnp.maximum(total, np.finfo(np.float32).tiny)  # 0 where nothing is seen
        part = (weighted / total).transpose(0, 3, 1, 2)
        rows = (x[:, :, 0] for x in (largest, jnp.maximum(largest, LOWEST) + jnp.log(total)))
        parts = part, *rows
        return tuple(_put(x, part, query_start, axis) for x, part, axis in zip(results, parts, (1, 2, 2), strict=True))

    rows = jnp.zeros((batch, heads, length))
    return _loop(0, tiles.chunks, tiles.chunks, one_chunk, (jnp.zeros(value.shape), rows, rows))


def _attention_forward(query, key, key_shared, value, documents, scale, size):
    output, row_max, lse = _forward(query, key, key_shared, value, documents, scale, size)
    # Everything that is kept for the backward pass, and the one place where it can be named for a memory policy.
    residuals = query, key, key_shared, value, documents, output, lse
    return (output, row_max), residuals


def _attention_backward(scale, size, residuals, gradients):
    query, key, key_shared, value, documents, output, lse = residuals
    d_output, _ = gradients  # the row maximum carries no gradient
    tiles = _Tiles(query, key, key_shared, value, documents, scale, size)
    batch, length, heads, width = query.shape
    own = key.shape[3]
    dots = jnp.einsum("bthv,bthv->bht", d_output, output, precision="highest")
    # Chunks of queries whose first chunk of keys is at or before each chunk of keys: they are the ones up to a last.
    chunks = np.arange(tiles.chunks)
    end_queries = (tiles.first_keys()[None] <= chunks[:, None]).sum(axis=1, dtype=np.int32)

    def rows(x: Array, start: Array) -> Array:
        """[B,H,T] -> [B,H,1,C]."""
        return lax.expand_dims(_cut(x, start, size, 2), (2,))

    def one_chunk(chunk: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        key_start = chunk * size
        keys, values = tiles.keys(key_start)

        def one_tile(query_chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_keys, d_values, d_query = carry
            query_start = query_chunk * size
            queries = tiles.cut(query, query_start)
            d_part = tiles.cut(d_output, query_start).astype(value.dtype)
            logits, seen = tiles.logits(keys, queries, key_start, query_start)
            weights = jnp.where(seen, jnp.exp(logits - rows(lse, query_start)), 0)
            d_logits = weights * (_dot(values, d_part, -1, -1) - rows(dots, query_start))
            d_logits = d_logits.astype(query.dtype)
            d_values = d_values + _dot(weights.astype(value.dtype), d_part, -1, -2)
            d_keys = d_keys + _dot(d_logits, queries, -1, -2)
            part = _cut(d_query, query_start, size, 2) + _dot(d_logits, keys, -2, -2)
            return d_keys, d_values, _put(d_query, part, query_start, 2)

        d_key, d_shared, d_value, d_query = results
        carry = jnp.zeros(keys.shape), jnp.zeros(values.shape), d_query
        end = _at(end_queries, chunk)
        d_keys, d_values, d_query = _loop(chunk, end, tiles.chunks, one_tile, carry)
        d_keys = scale * d_keys
        parts = d_keys[..., :own].swapaxes(1, 2), d_keys[..., own:].sum(axis=1), d_values.swapaxes(1, 2)
        written = (_put(x, part, key_start, 1) for x, part in zip((d_key, d_shared, d_value), parts, strict=True))
        return *written, d_query

    zeros = [jnp.zeros_like(x) for x in (key, key_shared, value)]
    zeros += [jnp.zeros((batch, heads, length, width))]
    d_key, d_shared, d_value, d_query = _loop(0, tiles.chunks, tiles.chunks, one_chunk, tuple(zeros))
    d_query = (scale * d_query).swapaxes(1, 2).astype(query.dtype)
    return d_query, d_key, d_shared, d_value, None


_attention.defvjp(_attention_forward, _attention_backward)
