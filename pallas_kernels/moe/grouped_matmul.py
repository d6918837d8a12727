"""Grouped matrix product: rows sorted by group, each multiplied by its own group's matrix.

    out[i] = lhs[i] @ rhs[g]        for ends[g - 1] <= i < ends[g],   ends = cumsum(group_sizes)
    out[i] = 0                      for i >= ends[G - 1]
    dlhs[i] = dout[i] @ rhs[g]^T    (0 beyond the sum)
    drhs[g] = sum over i in group g of lhs[i]^T dout[i]    (exactly 0 for an empty group)

Invariant: a row beyond the sum enters no sum, in the forward pass or in the gradients, so it may hold anything, NaN
included.

`blocked` walks over blocks of rows that lie in one group each, so its cost follows the active rows: at most one partly
filled block per non-empty group, and nothing for the rows beyond the sum (XLA's own lowering of `ragged_dot` on CPUs is
one dense product of all rows per group). `ragged` is that primitive, for accelerators.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128


def block_rows(rows: int, groups: int) -> int:
    """Rows per block: the power of two at or above the mean group, within [16, 128], never above `rows`."""
    mean = -(-rows // groups)
    return min(rows, max(SMALLEST_BLOCK, min(LARGEST_BLOCK, 1 << (mean - 1).bit_length())))


def blocked(lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, "G"]) -> Float[Array, "M N"]:
    """The product block by block, accumulated in fp32 at least; M, G >= 1."""
    accumulator = jnp.promote_types(lhs.dtype, jnp.float32)
    # The loops update their results in place, which XLA:CPU does for fp32 but not for bf16 (it would convert the
    # whole array at every block): hence whole arrays are cast on the way in and out.
    blocks = _block_table(group_sizes, lhs.shape[0])
    return _blocked(lhs.astype(accumulator), rhs.astype(accumulator), blocks).astype(lhs.dtype)


def ragged(lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, "G"]) -> Float[Array, "M N"]:
    """The product by `lax.ragged_dot`, whose rows beyond the sum are masked on both sides."""
    active = lax.broadcasted_iota(jnp.int32, (lhs.shape[0], 1), 0) < jnp.sum(group_sizes)
    out = lax.ragged_dot(jnp.where(active, lhs, 0), rhs, group_sizes)
    return jnp.where(active, out, 0)


@jax.custom_vjp
def _blocked(lhs, rhs, blocks):
    return _blocked_forward(lhs, rhs, blocks)[0]


def _blocked_forward(lhs, rhs, blocks):
    def block(out, group, rows):
        return rows.put(out, rows.take(lhs) @ _at(rhs, group))

    out = jnp.zeros_like(lhs, shape=(lhs.shape[0], rhs.shape[2]))
    return _for_each_block(blocks, lhs.shape[0], block, out), (lhs, rhs, blocks)


def _blocked_backward(residuals, dout):
    lhs, rhs, blocks = residuals

    def block(carry, group, rows):
        dlhs, drhs = carry
        dout_rows = rows.only(rows.take(dout))
        dlhs = rows.put(dlhs, dout_rows @ _at(rhs, group).T)
        matrix = _at(drhs, group) + rows.only(rows.take(lhs)).T @ dout_rows
        drhs = lax.dynamic_update_slice(drhs, matrix[None], (group, 0, 0), allow_negative_indices=False)
        return dlhs, drhs

    # A weight gradient in the carry is updated in place: one matrix moves per block, not the stack of them.
    init = jnp.zeros_like(lhs), jnp.zeros_like(rhs)
    return *_for_each_block(blocks, lhs.shape[0], block, init), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


class _Rows:
    """The rows [start, start + size) of an array, of which the block owns [first, end)."""

    def __init__(self, start, size, first, end):
        self.start, self.size = start, size
        row = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        self.owned = (row >= first) & (row < end)

    def take(self, array):
        return lax.dynamic_slice_in_dim(array, self.start, self.size, allow_negative_indices=False)

    def only(self, rows):
        return jnp.where(self.owned, rows, 0)

    def put(self, array, rows):
        """Writes the rows the block owns; what other blocks wrote, or nobody will, stays."""
        rows = jnp.where(self.owned, rows, self.take(array))
        return lax.dynamic_update_slice_in_dim(array, rows, self.start, 0, allow_negative_indices=False)


def _at(array, index):
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def _block_table(group_sizes, rows):
    """Per group: the end of its rows, the end of its blocks, and the row of block 0, were that its own."""
    size = block_rows(rows, group_sizes.shape[0])
    counts = lax.div(group_sizes + (size - 1), jnp.full_like(group_sizes, size))
    ends, block_ends = lax.cumsum(group_sizes), lax.cumsum(counts)
    return ends, block_ends, ends - group_sizes - (block_ends - counts) * size


def _for_each_block(blocks, rows, body, init):
    """Folds `body(carry, group, rows)` over the blocks of all groups.

    The trip count is a value, not a shape, so empty groups and unused rows cost nothing. A block that would run past
    the array is moved back: it then covers rows of other blocks too, which `_Rows` leaves alone.
    """
    ends, block_ends, origins = blocks
    size = block_rows(rows, ends.shape[0])

    def step(index, carry):
        group = jnp.sum(block_ends <= index, dtype=jnp.int32)  # the first group with blocks left
        first = _at(origins, group) + index * size
        return body(carry, group, _Rows(lax.min(first, rows - size), size, first, _at(ends, group)))

    return lax.fori_loop(0, block_ends[-1], step, init)
