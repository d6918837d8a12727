"""KDA on GPUs, backward: one kernel carries the gradient of the state back, two give a chunk its own gradients.

In the words of gpu_forward.py, with dS' the gradient of the state after a chunk and do that of its output:

    de = (A M)^T do + (M^T (k . D_end,j)) dS'
    dS = D_end,start dS' + scale (q . D_i,start)^T do - (k . D_i,start)^T (beta de)

are scan_gradients, chunk by chunk from the last. The rest is chunk by chunk in any order: chunk_pairs makes V~ = M e
again from S and from it

    dA = do V~^T  (i >= j)        dL / -beta = de V~^T  (i > j)        dv = beta de

and chunk_gradients, a program for each chunk and block of key channels, the gradients of q, k, log_decay and beta from
those and from S and dS'. That of beta is sum_v de (v - (k . D) S) - sum_j (L_ij / beta_i) (de V~^T)_ij with L / beta
computed as such: nothing is divided by beta, which may be 0. The gradient of a log decay sums those of the factors that
cover it, as in chunk.py, so that the pairs i = j never have to cancel.

Invariants: those of gpu_forward.py. Key heads that several value heads read get a gradient for each of them.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import Launch, Operand
from pallas_kernels.kda.gpu_blocks import Sizes


def scan_gradients(sizes: Sizes) -> Launch:
    """q . D, k . D, M^T (k . D), A M, D_end,start, beta, d_output, dS' of the last chunk -> dS' of each, de, first dS.

    dS' of each chunk comes in the operands' dtype.
    """
    block = sizes.tiles.back_values

    def body(
        query_read_ref, key_read_ref, key_write_ref, mixed_ref, total_ref, beta_ref, d_output_ref, last_ref,
        d_states_ref, d_error_ref, first_ref,
    ):  # fmt: skip
        def one_chunk(index: Array, d_state: Array) -> Array:
            chunk = sizes.chunks - 1 - index
            operand = d_state.astype(sizes.dtype)
            d_states_ref[pl.ds(chunk, 1), :, :] = operand[None]
            at = pl.ds(chunk * sizes.chunk, sizes.chunk)
            d_output = d_output_ref[at, :].T
            d_error = sizes.product(d_output, mixed_ref[at, :]) + sizes.product(operand, key_write_ref[at, :], 1, 1)
            d_error_ref[at, :] = d_error.astype(sizes.dtype).T
            d_state = total_ref[chunk, :][None, :] * d_state + sizes.product(d_output, query_read_ref[at, :])
            return d_state - sizes.product(beta_ref[at][None, :] * d_error, key_read_ref[at, :])

        first_ref[...] = lax.fori_loop(0, sizes.chunks, one_chunk, last_ref[...])

    wide, values, state = sizes.all_operands(sizes.width), sizes.all_values(block), sizes.one_state(block)
    return Launch(
        "kda_scan_gradients",
        body,
        (sizes.value_width // block, sizes.value_heads, sizes.batch),
        (
            wide, wide, wide, sizes.all_operands(sizes.chunk), sizes.all_totals(), sizes.all_numbers(), values, state,
        ),
        (sizes.all_states(sizes.chunks, sizes.dtype, block), values, state),
        sizes.tiles.back_warps,
        sizes.tiles.back_stages,
        sizes.interpret,
    )  # fmt: skip


def chunk_pairs(sizes: Sizes) -> Launch:
    """value, beta, k . D, M, S, d_output, de -> V~, do V~^T, de V~^T, d_value, the values' part of d_beta."""
    step, key_step = sizes.tiles.pairs_values, min(64, sizes.width)

    def body(
        value_ref, beta_ref, key_read_ref, inverse_ref, state_ref, d_output_ref, d_error_ref,
        update_ref, d_scores_ref, d_lower_ref, d_value_ref, d_beta_ref,
    ):  # fmt: skip
        def one_step(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_scores, d_lower, d_beta = carry
            at, beta = pl.ds(index * step, step), beta_ref[...]

            def predict(index: Array, error: Array) -> Array:
                of_keys = pl.ds(index * key_step, key_step)
                return error - sizes.product(state_ref[at, of_keys], key_read_ref[:, of_keys], 1, 1)

            values = value_ref[:, at].T.astype(jnp.float32)
            error = lax.fori_loop(0, sizes.width // key_step, predict, values)
            update = sizes.product(beta[None, :] * error, inverse_ref[...], 1, 1).astype(sizes.dtype)
            update_ref[at, :] = update
            d_error = d_error_ref[:, at]
            d_value_ref[:, at] = (beta[:, None] * d_error.astype(jnp.float32)).astype(sizes.dtype)
            d_beta = d_beta + jnp.sum(error * d_error.T.astype(jnp.float32), axis=0)
            d_scores = d_scores + sizes.product(d_output_ref[:, at], update)
            return d_scores, d_lower + sizes.product(d_error, update), d_beta

        nothing = jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32)
        carry = nothing, nothing, jnp.zeros((sizes.chunk,), jnp.float32)
        d_scores, d_lower, d_beta_ref[...] = lax.fori_loop(0, sizes.value_width // step, one_step, carry)
        d_scores_ref[...], d_lower_ref[...] = d_scores.astype(sizes.dtype), d_lower.astype(sizes.dtype)

    values, square, numbers = sizes.values(), sizes.square(), sizes.numbers()
    return Launch(
        "kda_chunk_pairs",
        body,
        (sizes.value_heads, sizes.chunks, sizes.batch),
        (values, numbers, sizes.operand(sizes.width), square, sizes.state(jnp.float32), values, values),
        (sizes.update(), square, square, values, numbers),
        sizes.tiles.pairs_warps,
        1,
        sizes.interpret,
    )


def chunk_gradients(sizes: Sizes) -> Launch:
    """-> d_query, d_key, d_log_decay, and the keys' part of d_beta by block of key channels, [B,T,HV,blocks].

    From query, key, log_decay, beta, S, dS', d_output, d_value, V~, do V~^T, de V~^T, tables.
    """
    step, levels = sizes.tiles.gradient_channels, sizes.levels
    blocks = sizes.width // step

    def body(
        query_ref, key_ref, log_decay_ref, beta_ref, state_ref, d_state_ref, d_output_ref, d_value_ref, update_ref,
        d_scores_ref, d_lower_ref, covers_ref, pairs_ref, d_query_ref, d_key_ref, d_log_decay_ref, d_beta_ref,
    ):  # fmt: skip
        beta = beta_ref[...][:, None]
        query = query_ref[...].astype(jnp.float32) * np.float32(sizes.scale)
        key, log_decay = key_ref[...].astype(jnp.float32), log_decay_ref[...]
        state, d_state = state_ref[...], d_state_ref[...]
        d_total = jnp.exp(jnp.sum(log_decay, axis=0)) * jnp.sum(state * d_state.astype(jnp.float32), axis=0)
        read = jnp.exp(sizes.sums(covers_ref[levels], log_decay))
        d_query = read * sizes.product(d_output_ref[...], state)
        d_key = -read * sizes.product(d_value_ref[...], state)
        d_log_decay = sizes.sums(covers_ref[levels], query * d_query + key * d_key, transpose=True)
        write = jnp.exp(sizes.sums(covers_ref[levels + 1], log_decay))
        d_write = write * sizes.product(update_ref[...], d_state, 0, 0)
        d_log_decay = d_log_decay + sizes.sums(covers_ref[levels + 1], key * d_write, transpose=True)
        # The pairs i = j hold no decay and stay out of its gradient.
        row, column = (lax.broadcasted_iota(np.int32, (sizes.chunk, sizes.chunk), axis) for axis in (0, 1))
        diagonal = jnp.where(row == column, d_scores_ref[...].astype(jnp.float32), 0)
        diagonal = jnp.sum(diagonal, axis=1, keepdims=True)

        def one_level(level: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_query, d_key, d_log_decay, d_beta = carry
            # Read again: what a loop finds in registers it keeps there, and they are short.
            query = query_ref[...].astype(jnp.float32) * np.float32(sizes.scale)
            key = key_ref[...].astype(jnp.float32)
            factor = jnp.exp(sizes.sums(covers_ref[level], log_decay_ref[...]))
            queries, keys = query * factor, key * factor
            d_scores, d_lower = d_scores_ref[...] * pairs_ref[level], d_lower_ref[...] * pairs_ref[level]
            d_queries = factor * sizes.product(d_scores, keys)
            as_row = factor * sizes.product(d_lower, keys)  # its rows still lack -beta
            d_columns = sizes.product(d_scores, queries, 0, 0) - sizes.product(d_lower, beta * keys, 0, 0)
            d_keys = factor * d_columns - beta * as_row
            covered = query * d_queries + key * d_keys
            d_log_decay = d_log_decay + sizes.sums(covers_ref[level], covered, transpose=True)
            return d_query + d_queries, d_key + d_keys, d_log_decay, d_beta - jnp.sum(key * as_row, axis=1)

        d_query, d_key = d_query + diagonal * key, d_key + d_write + diagonal * query
        carry = d_query, d_key, d_log_decay, jnp.zeros((sizes.chunk,), jnp.float32)
        d_query, d_key, d_log_decay, d_beta = lax.fori_loop(0, levels, one_level, carry)
        d_query_ref[...] = (np.float32(sizes.scale) * d_query).astype(d_query_ref.dtype)
        d_key_ref[...] = d_key.astype(d_key_ref.dtype)
        d_log_decay_ref[...] = d_log_decay + d_total[None, :]
        d_beta_ref[...] = d_beta

    def whole(operand: Operand) -> Operand:
        """The operand for programs of (head, block of key channels)."""
        return operand._replace(index=lambda h, c, b: operand.index(h // blocks, c, b))

    def by_block(operand: Operand) -> Operand:
        """The same, its last axis cut in blocks."""
        index = lambda h, c, b: (*operand.index(h // blocks, c, b)[:-1], h % blocks)  # noqa: E731
        return operand._replace(block=(*operand.block[:-1], step), index=index)

    keys, log_decays, values = by_block(sizes.keys()), by_block(sizes.log_decays()), whole(sizes.values())
    state, d_state = (by_block(sizes.state(dtype)) for dtype in (jnp.float32, sizes.dtype))
    square = whole(sizes.square())
    # The sum over the value heads of a key head is left to XLA, in fp32.
    grouped = sizes.heads < sizes.value_heads
    d_keys = by_block(sizes.tokens(sizes.width, jnp.float32 if grouped else sizes.dtype))
    shape = sizes.batch, sizes.length, sizes.value_heads, blocks
    d_beta = Operand(
        shape, jnp.float32, (None, sizes.chunk, None, None), lambda h, c, b: (b, c, h // blocks, h % blocks)
    )
    return Launch(
        "kda_chunk_gradients",
        body,
        (sizes.value_heads * blocks, sizes.chunks, sizes.batch),
        (
            keys, keys, log_decays, whole(sizes.numbers()), state, d_state, values, values, whole(sizes.update()),
            square, square, *sizes.tables(),
        ),
        (d_keys, d_keys, log_decays, d_beta),
        sizes.tiles.gradient_warps,
        1,
        sizes.interpret,
    )  # fmt: skip
