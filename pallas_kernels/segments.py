"""Documents in a packed row, from its segment ids [B,T].

A document is a maximal run of equal non-zero ids; id 0 is padding, which is skipped: the run goes on behind it. An id
never returns in a row once another document has begun.
Invariant: apart from `following` and `first_id`, everything here depends on the ids at or before a position, never on
later ones.
"""

import numpy as np
from jax import Array, lax
from jaxtyping import Int

PADDING, TOKEN, DOCUMENT_START = 0, 1, 2


def keep_tokens(x: Array | None, ids: Array | None) -> Array | None:
    """x [B,T,...] with 0 where `ids` [B,T] (segment ids or marks) are 0, whatever it holds; so does the transpose.

    Without x or ids x as it is.
    """
    if ids is None or x is None:
        return x
    kept = lax.broadcast_in_dim(lax.ne(ids, _zero(ids)), x.shape, (0, 1))
    return lax.select(kept, x, lax.full_like(x, 0))


def take(x: Array, index: Int[Array, "B N"]) -> Array:
    """x [B,T,...] -> x[b, index[b, n]] as [B,N,...]; every index must be in 0..T-1."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, x.ndim)),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, lax.expand_dims(index, (2,)), numbers, (1, 1, *x.shape[2:]), mode=mode)


def previous(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of the last token before each position that is not padding; 0 where there is none."""
    last = lax.cummax(_token_positions(segment_ids, 0), axis=1)
    return lax.pad(last, np.int32(0), ((0, 0, 0), (1, -1, 0)))


def following(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of the next token after each position that is not padding; T - 1 where there is none."""
    end = segment_ids.shape[1] - 1
    first = lax.cummin(_token_positions(segment_ids, end), axis=1, reverse=True)
    return lax.pad(first, np.int32(end), ((0, 0, 0), (-1, 1, 0)))


def _token_positions(segment_ids: Array, otherwise: int) -> Array:
    positions = lax.broadcasted_iota(np.int32, segment_ids.shape, 1)
    return lax.select(lax.ne(segment_ids, _zero(segment_ids)), positions, lax.full_like(positions, otherwise))


def marks(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """PADDING, TOKEN or DOCUMENT_START for each position, int32.

    The first document of a row has no DOCUMENT_START: the state that enters the row belongs to it.
    """
    if segment_ids.shape[1] == 0:
        return segment_ids.astype(np.int32)
    zero = _zero(segment_ids)
    before = take(segment_ids, previous(segment_ids))  # 0, or the id itself at position 0, where there is no token
    starts = lax.bitwise_and(lax.ne(before, zero), lax.ne(before, segment_ids)).astype(np.int32)
    return (starts + np.int32(TOKEN)) * lax.ne(segment_ids, zero).astype(np.int32)


def starts(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """First position of each position's document, 0 for the row's first one; at padding that of the document before."""
    positions = _token_positions(segment_ids, 0)
    first = lax.eq(marks(segment_ids), np.int32(DOCUMENT_START))
    return lax.cummax(lax.select(first, positions, lax.full_like(positions, 0)), axis=1)


def first_id(segment_ids: Int[Array, "B T"]) -> Int[Array, "B"]:
    """Document of each row's first token that is not padding; 0 where there is none."""
    batch, length = segment_ids.shape
    if length == 0:
        return lax.full((batch,), 0, segment_ids.dtype)
    position = lax.argmax(lax.ne(segment_ids, _zero(segment_ids)), 1, np.int32)
    return lax.squeeze(take(segment_ids, lax.expand_dims(position, (1,))), (1,))


def _zero(x: Array) -> np.ndarray:
    return np.zeros((), x.dtype)
