"""KDA on GPUs, forward: one kernel makes of each chunk what the scan needs of it, one carries the state.

With the decay D_ij = prod_{j < s <= i} alpha_s per key channel and S the state before a chunk:

    A_ij = scale sum_k q_i k_j D_ij  (i >= j)      L_ij = beta_i sum_k k_i k_j D_ij  (i > j)      M = (I + L)^-1
    e    = beta (v - (k . D_i,start) S)            V~ = M e
    o    = scale (q . D_i,start) S + A V~          S' = D_end,start S + (k . D_end,j)^T V~

(chunk.py has the same with its reasons.) M e is never formed in the scan: chunk_operands, a program per chunk, writes

    (A M),    M^T (k . D_end,j),    scale (q . D_i,start),    k . D_i,start,    D_end,start

and scan_states is left with two steps that depend on each other, e from S and S' from e:

    o  = scale (q . D_i,start) S + (A M) e         S' = D_end,start S + (M^T (k . D_end,j))^T e

It holds S, e and o with the value channels first: rows of the products are then as many as a GPU's warps want, each
warp keeps its own, and S and e are operands without leaving registers.

Decays are split at the borders of binary levels as in chunk.py, every level one masked product over the whole chunk:
tensor cores multiply more zeros than they would have to, but Triton cannot cut tiles out of registers, and one loop has
one body for all levels.

Invariants: state, decays, L, M and all sums are fp32; no exponent is positive; products of fp32 inputs have fp32
accuracy, those of bf16 inputs have operands rounded to bf16, L and M excepted.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import Launch
from pallas_kernels.kda.gpu_blocks import Sizes


def chunk_operands(sizes: Sizes, with_inverse: bool = False) -> Launch:
    """query, key, log_decay, beta, tables -> q . D, k . D, M^T (k . D), A M, D_end,start; `with_inverse` M too."""
    step, levels = sizes.tiles.operand_channels, sizes.levels

    def body(
        query_ref, key_ref, log_decay_ref, beta_ref, covers_ref, pairs_ref,
        query_read_ref, key_read_ref, key_write_ref, mixed_ref, total_ref, *inverse_ref,
    ):  # fmt: skip
        row, column = (lax.broadcasted_iota(np.int32, (sizes.chunk, sizes.chunk), axis) for axis in (0, 1))

        def one_step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            at = pl.ds(index * step, step)
            query = query_ref[:, at].astype(jnp.float32) * np.float32(sizes.scale)
            key = key_ref[:, at].astype(jnp.float32)
            log_decay = log_decay_ref[:, at]
            read = jnp.exp(sizes.sums(covers_ref[levels], log_decay))
            query_read_ref[:, at] = (query * read).astype(sizes.dtype)
            key_read_ref[:, at] = (key * read).astype(sizes.dtype)
            total_ref[at] = jnp.exp(jnp.sum(log_decay, axis=0))

            def one_level(level: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                scores, lower = carry
                factor = jnp.exp(sizes.sums(covers_ref[level], log_decay))
                keys, pairs = key * factor, pairs_ref[level].astype(jnp.float32)
                scores = scores + pairs * sizes.product(query * factor, keys, 1, 1)
                return scores, lower + pairs * sizes.precise(keys, keys, 1, 1)

            scores, lower = lax.fori_loop(0, levels, one_level, carry)
            diagonal = jnp.sum(query * key, axis=1, keepdims=True)
            return scores + jnp.where(row == column, diagonal, 0), lower

        nothing = jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32)
        scores, lower = lax.fori_loop(0, sizes.width // step, one_step, (nothing, nothing))
        lower = beta_ref[...][:, None] * lower

        def join(level: Array, inverse: Array) -> Array:
            """Inverses of blocks of 2^level rows to those of twice as many; see chunk._inverse."""
            between = sizes.precise(inverse, lower * pairs_ref[level].astype(jnp.float32))
            return inverse - sizes.precise(between, inverse)

        inverse = lax.fori_loop(0, levels, join, jnp.where(row == column, 1.0, 0.0))
        if with_inverse:
            inverse_ref[0][...] = inverse.astype(sizes.dtype)
        mixed_ref[...] = sizes.product(scores, inverse).astype(sizes.dtype)

        def one_write(index: Array, nothing: None) -> None:
            at = pl.ds(index * step, step)
            write = jnp.exp(sizes.sums(covers_ref[levels + 1], log_decay_ref[:, at]))
            key = key_ref[:, at].astype(jnp.float32) * write
            key_write_ref[:, at] = sizes.product(inverse, key, 0, 0).astype(sizes.dtype)

        lax.fori_loop(0, sizes.width // step, one_write, None)

    wide = sizes.operand(sizes.width)
    results = wide, wide, wide, sizes.square(), sizes.total()
    return Launch(
        "kda_chunk_operands",
        body,
        (sizes.value_heads, sizes.chunks, sizes.batch),
        (sizes.keys(), sizes.keys(), sizes.log_decays(), sizes.numbers(), *sizes.tables()),
        (*results, sizes.square()) if with_inverse else results,
        sizes.tiles.operand_warps,
        1,
        sizes.interpret,
    )


def scan_states(sizes: Sizes) -> Launch:
    """q . D, k . D, M^T (k . D), A M, D_end,start, value, beta, first state -> output, states, last state."""
    block, every = sizes.tiles.scan_values, sizes.state_every

    def body(
        query_read_ref, key_read_ref, key_write_ref, mixed_ref, total_ref, value_ref, beta_ref, first_ref,
        output_ref, states_ref, last_ref,
    ):  # fmt: skip
        def one_chunk(chunk: Array, state: Array) -> Array:
            def keep() -> None:
                states_ref[pl.ds(lax.div(chunk, np.int32(every)), 1), :, :] = state[None]

            keep() if every == 1 else pl.when(lax.rem(chunk, np.int32(every)) == 0)(keep)
            at = pl.ds(chunk * sizes.chunk, sizes.chunk)
            operand = state.astype(sizes.dtype)
            error = value_ref[at, :].T.astype(jnp.float32) - sizes.product(operand, key_read_ref[at, :], 1, 1)
            error = (beta_ref[at][None, :] * error).astype(sizes.dtype)
            output = sizes.product(operand, query_read_ref[at, :], 1, 1) + sizes.product(error, mixed_ref[at, :], 1, 1)
            output_ref[at, :] = output.T.astype(output_ref.dtype)
            return total_ref[chunk, :][None, :] * state + sizes.product(error, key_write_ref[at, :])

        last_ref[...] = lax.fori_loop(0, sizes.chunks, one_chunk, first_ref[...])

    wide, values, state = sizes.all_operands(sizes.width), sizes.all_values(block), sizes.one_state(block)
    return Launch(
        "kda_scan_states",
        body,
        (sizes.value_width // block, sizes.value_heads, sizes.batch),
        (
            wide, wide, wide, sizes.all_operands(sizes.chunk), sizes.all_totals(), values, sizes.all_numbers(), state,
        ),
        (values, sizes.all_states(sizes.states, jnp.float32, block), state),
        sizes.tiles.scan_warps,
        sizes.tiles.scan_stages,
        sizes.interpret,
    )  # fmt: skip
