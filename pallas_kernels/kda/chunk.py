"""One chunk of C tokens of KDA as matrix products: forward, and backward from the state at its start.

With the decay D_ij = prod_{j < s <= i} alpha_s per key channel, alpha = e^log_decay, and S the state before the chunk:

    A_ij = sum_k q_i k_j D_ij  (i >= j)       L_ij = beta_i sum_k k_i k_j D_ij  (i > j)
    V~   = (I + L)^-1 beta (v - (k . D_i,start) S)
    o    = (q . D_i,start) S + A V~           S' = D_end,start S + (k . D_end,j)^T V~

(Kimi Linear, arXiv 2510.26692, section 3; here V~ is solved for directly, without the matrices W and U.)

D_ij is split as (decay up to row i) * (decay after row j) around a border between j and i. The borders are those of
binary levels: at level b the rows are cut in blocks of 2b, row factors cover the lower half of a block and column
factors its upper half, so every pair i > j belongs to exactly one level and one block. The logarithm of a factor is a
direct sum of the log decays that it covers (one product with a 0/1 matrix, TABLES.sums), so no exponent is positive, no
cumulative sum is differenced, and a decay of 0 separates documents exactly. In the backward pass the gradient of a log
decay is the transposed sum of the factors' own gradients: the pairs i = j, which hold no decay, never enter it, so they
do not have to cancel.

Without queries (context.py asks only for states) everything that q leads to is left out.

Invariants: everything is fp32; row i uses nothing of a row after i, apart from products with exact zeros, which are
zeros as long as no product overflows.
Layout: [B,H,C,*], beta [B,H,C,1]; log decays and their gradients stay as the caller has them, [B,C,H,K].
"""

import functools
from typing import NamedTuple

import numpy as np
from jax import Array, lax

F32_PRECISE = lax.Precision.HIGHEST  # never single-pass TF32 or bf16: the inverse and the decays decide everything


class Tables(NamedTuple):
    """Constants for a chunk of C tokens with log2(C) levels; 0/1 in fp32."""

    sums: np.ndarray  # [levels + 2, C, C]: which log decays a factor covers; the last two: start..i and i+1..end
    pairs: np.ndarray  # [1, 1, levels, 2C, C]: which (row, column) belong to a level, for rows of q and then of k
    diagonal: np.ndarray  # [1, 1, C, C]


@functools.cache
def tables(length: int) -> Tables:
    """The constants for chunks of `length` tokens, a power of two >= 2."""
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    sums, pairs = [], []
    half = 1
    while half < length:
        start = row // half * half
        lower = row // half % 2 == 1
        row_factor = (column >= start) & (column <= row)
        column_factor = (column > row) & (column < start + half)
        sums.append(np.where(lower, row_factor, column_factor))
        pairs.append(lower & (column // half == row // half - 1))
        half *= 2
    sums += [column <= row, column > row]
    as_fp32 = (np.asarray(x, np.float32) for x in (sums, [[np.concatenate([pairs, pairs], 1)]], [[row == column]]))
    return Tables(*as_fp32)


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Matrix product over one axis each (-1 or -2); the leading axes are a batch."""
    batch = tuple(range(a.ndim - 2))
    contract = ((a.ndim + a_axis,), (b.ndim + b_axis,))
    return lax.dot_general(a, b, (contract, (batch, batch)), precision=F32_PRECISE)


def _matmul(a: Array, b: Array) -> Array:
    return _product(a, b, -1, -2)


def _matmul_nt(a: Array, b: Array) -> Array:
    return _product(a, b, -1, -1)


def _matmul_tn(a: Array, b: Array) -> Array:
    return _product(a, b, -2, -2)


def _row_sums(x: Array, copies: int) -> Array:
    """[..., n] -> [..., copies]: sums over the last axis, as a product with ones: reductions are slow on CPUs."""
    ones = np.ones((x.shape[-1], copies), np.float32)
    return lax.dot_general(x, ones, (((x.ndim - 1,), (0,)), ((), ())), precision=F32_PRECISE)


def _sum_levels(x: Array) -> Array:
    """[B,H,levels,...] -> [B,H,...]; additions of slices, which fuse, where a reduction would not."""
    return functools.reduce(lax.add, [lax.index_in_dim(x, level, 2, keepdims=False) for level in range(x.shape[2])])


def _first(x: Array, axis: int) -> Array:
    """The first half along an axis."""
    return lax.slice_in_dim(x, 0, x.shape[axis] // 2, axis=axis)


def _second(x: Array, axis: int) -> Array:
    """The second half along an axis."""
    return lax.slice_in_dim(x, x.shape[axis] // 2, None, axis=axis)


def _of_rows(pairs: np.ndarray, query: Array | None) -> np.ndarray:
    """`pairs` for the rows that there are."""
    return pairs if query is not None else pairs[..., : pairs.shape[-1], :]


def _inverse(lower: Array, pairs: np.ndarray) -> Array:
    """(I + lower)^-1 of a strictly lower triangular matrix by joining blocks: 1 -> 2 -> ... -> C rows.

    A block [[X, 0], [Y, Z]] has the inverse [[X', 0], [-Z' Y X', Z']]: exact however ill-conditioned powers of `lower`
    are (a Neumann series of 64 equal keys holds terms of 10^17).
    """
    identity = np.eye(lower.shape[-1], dtype=np.float32)[None, None]
    pairs = pairs[..., : lower.shape[-1], :]
    inverse = identity - lower * pairs[:, :, 0]
    for level in range(1, pairs.shape[2]):
        inverse = inverse - _matmul(_matmul(inverse, lower * pairs[:, :, level]), inverse)
    return inverse


def _rows(query: Array | None, key: Array, factor: Array, axis: int) -> Array:
    """[q; k] * factor, one above the other along `axis`, or k * factor alone."""
    return key * factor if query is None else lax.concatenate([query * factor, key * factor], axis)


def _split(x: Array, query: Array | None, axis: int) -> tuple[Array | None, Array]:
    """What belongs to q and to k of an array whose rows are [q; k]."""
    return (None, x) if query is None else (_first(x, axis), _second(x, axis))


class _Parts(NamedTuple):
    """What both passes need of a chunk. [q; k] are stacked, 2C rows, where they meet the same matrix; or k is alone."""

    factors: Array  # [B,H,levels,C,K]
    rows_levels: Array  # [B,H,levels,2C,K]: [q; k] * factors
    key_levels: Array  # [B,H,levels,C,K]: its rows of k
    read: Array  # [B,H,C,K]: decay from the chunk's start
    write: Array  # [B,H,C,K]: decay to the chunk's end
    total: Array  # [B,H,K,1]: over the whole chunk
    rows_read: Array  # [B,H,2C,K]: [q; k] * read
    key_write: Array
    scores: Array | None  # A
    lower: Array  # L without its beta
    inverse: Array
    answers: Array | None  # [B,H,C,V]: q's products with the state
    error: Array  # [B,H,C,V]: v minus k's products with the state
    update: Array  # V~


def _parts(query: Array | None, key: Array, value: Array, log_decay: Array, beta: Array, state: Array) -> _Parts:
    batch, heads, length, width = key.shape
    sums, pairs, diagonal = tables(length)
    levels = pairs.shape[2]
    log_factors = lax.dot_general(sums, log_decay, (((2,), (1,)), ((), ())), precision=F32_PRECISE)
    every_factor = lax.exp(lax.transpose(log_factors, (2, 3, 0, 1, 4)))
    factors = lax.slice_in_dim(every_factor, 0, levels, axis=2)
    read = lax.index_in_dim(every_factor, levels, 2, keepdims=False)
    write = lax.index_in_dim(every_factor, levels + 1, 2, keepdims=False)
    total = lax.reshape(lax.slice_in_dim(read, length - 1, length, axis=2), (batch, heads, width, 1))

    rows_levels = _rows(*(None if x is None else lax.expand_dims(x, (2,)) for x in (query, key)), factors, 3)
    _, key_levels = _split(rows_levels, query, 3)
    products = _sum_levels(_matmul_nt(rows_levels, key_levels) * _of_rows(pairs, query))
    scores, lower = _split(products, query, 2)
    if query is not None:
        scores = scores + _row_sums(query * key, length) * diagonal
    inverse = _inverse(lower * beta, pairs)

    rows_read = _rows(query, key, read, 2)
    answers, predicted = _split(_matmul(rows_read, state), query, 2)
    error = value - predicted
    update = _matmul(inverse, beta * error)
    return _Parts(
        factors, rows_levels, key_levels, read, write, total, rows_read, key * write,
        scores, lower, inverse, answers, error, update,
    )  # fmt: skip


def forward(
    query: Array | None, key: Array, value: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array | None, Array]:
    """One chunk: -> output [B,H,C,V], None without queries, and the state after it [B,H,K,V]."""
    p = _parts(query, key, value, log_decay, beta, state)
    output = None if query is None else p.answers + _matmul(p.scores, p.update)
    return output, p.total * state + _matmul_tn(p.key_write, p.update)


def backward(
    query: Array | None, key: Array, value: Array, log_decay: Array, beta: Array, state: Array,
    d_output: Array | None, d_state: Array,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Gradients from those of the output and of the state after the chunk.

    -> d_query, d_key, d_value, d_log_decay, d_beta in their inputs' layouts, and that of the state before the chunk.
    """
    p = _parts(query, key, value, log_decay, beta, state)
    batch, heads, length, width = key.shape
    sums, pairs, diagonal = tables(length)

    # From o and S' to V~ and through the triangular solve. Rows [q; k] then receive [d_o; -d_v] from state and pairs.
    d_update = _matmul(p.key_write, d_state)
    if query is not None:
        d_update = d_update + _matmul_tn(p.scores, d_output)
    d_solved = _matmul_tn(p.inverse, d_update)
    d_value = beta * d_solved
    d_beta = _row_sums(d_solved * (p.error - _matmul(p.lower, p.update)), 1)
    d_rows = -d_value if query is None else lax.concatenate([d_output, -d_value], 2)
    d_rows_read = _matmul_nt(d_rows, state)
    d_products = _matmul_nt(d_rows, p.update)
    d_key_write = _matmul_nt(p.update, d_state)
    d_total = p.total * _row_sums(state * d_state, 1)
    d_state = p.total * d_state + _matmul_tn(p.rows_read, d_rows)

    # Through the pairs of each level: as rows, and key also as columns.
    d_pairs = lax.expand_dims(d_products, (2,)) * _of_rows(pairs, query)
    d_query_levels, d_key_levels = _split(_matmul(d_pairs, p.key_levels), query, 3)
    d_query_read, d_key_read = _split(d_rows_read, query, 2)
    d_key_levels = p.factors * (d_key_levels + _matmul_tn(d_pairs, p.rows_levels))
    d_key_read, d_key_write = p.read * d_key_read, p.write * d_key_write
    d_key = _sum_levels(d_key_levels) + d_key_read + d_key_write
    # Each factor's gradient in the logarithm is the sum of what is multiplied by it times its gradient.
    d_levels, d_read = lax.expand_dims(key, (2,)) * d_key_levels, key * d_key_read
    d_query = None
    if query is not None:
        d_query_levels, d_query_read = p.factors * d_query_levels, p.read * d_query_read
        d_diagonal = _row_sums(_first(d_products, 2) * diagonal, width)
        d_query = _sum_levels(d_query_levels) + d_query_read + d_diagonal * key
        d_key = d_key + d_diagonal * query
        d_levels = d_levels + lax.expand_dims(query, (2,)) * d_query_levels
        d_read = d_read + query * d_query_read

    # Back through the sums of log decays.
    d_end = lax.reshape(d_total, (batch, heads, 1, width))
    d_read = d_read + lax.pad(d_end, np.float32(0), ((0, 0, 0), (0, 0, 0), (length - 1, 0, 0), (0, 0, 0)))
    d_log_decay = (
        lax.dot_general(sums[:-2], d_levels, (((0, 1), (2, 3)), ((), ())), precision=F32_PRECISE)
        + lax.dot_general(sums[-2], d_read, (((0,), (2,)), ((), ())), precision=F32_PRECISE)
        + lax.dot_general(sums[-1], key * d_key_write, (((0,), (2,)), ((), ())), precision=F32_PRECISE)
    )
    return d_query, d_key, d_value, lax.transpose(d_log_decay, (1, 0, 2, 3)), d_beta, d_state
