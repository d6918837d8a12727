"""Grouped matrix product: rows sorted by group, each multiplied by its own group's matrix.

    out[i] = lhs[i] @ rhs[g]        for ends[g - 1] <= i < ends[g],   ends = cumsum(group_sizes)
    out[i] = 0                      for i >= ends[G - 1]
    dlhs[i] = dout[i] @ rhs[g]^T    (0 beyond the sum)
    drhs[g] = sum over i in group g of lhs[i]^T dout[i]    (exactly 0 for an empty group)

Invariant: a row beyond the sum enters no sum, in the forward pass or in the gradients, so it may hold anything, NaN
included.

`blocked` walks over blocks of rows that lie in one group each (blocks.py), so its cost follows the active rows (XLA's
own lowering of `ragged_dot` on CPUs is one dense product of all rows per group). `ragged` is that primitive, for
accelerators.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.moe.blocks import LANES, for_each_block, of_groups, product, put_groups, transposed


def blocked(lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, "G"]) -> Float[Array, "M N"]:
    """The product block by block, accumulated in fp32 at least; M, G >= 1."""
    accumulator = jnp.promote_types(lhs.dtype, jnp.float32)
    # The loops update their results in place, which XLA:CPU does for fp32 but not for bf16 (it would convert the
    # whole array at every block): hence whole arrays are cast on the way in and out.
    return _blocked(lhs.astype(accumulator), rhs.astype(accumulator), group_sizes).astype(lhs.dtype)


def ragged(lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, "G"]) -> Float[Array, "M N"]:
    """The product by `lax.ragged_dot`, whose rows beyond the sum are masked on both sides."""
    active = lax.broadcasted_iota(jnp.int32, (lhs.shape[0], 1), 0) < jnp.sum(group_sizes)
    # On CPUs each group is a product of all rows: what an empty group's matrix holds must not meet them.
    rhs = jnp.where((group_sizes > 0)[:, None, None], rhs, 0)
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    out = lax.ragged_dot(jnp.where(active, lhs, 0), rhs, group_sizes, precision=precision)
    return jnp.where(active, out, 0)


@jax.custom_vjp
def _blocked(lhs, rhs, sizes):
    return _blocked_forward(lhs, rhs, sizes)[0]


def _blocked_forward(lhs, rhs, sizes):
    def body(block, matrix, out, sums):
        return block.put(out, product(block.take(lhs), matrix)), sums

    out = jnp.zeros_like(lhs, shape=(lhs.shape[0], rhs.shape[2]))
    out = for_each_block(sizes, lhs.shape[0], lambda groups: of_groups(rhs, groups), body, out)
    return out, (lhs, rhs, sizes)


def _blocked_backward(residuals, dout):
    lhs, rhs, sizes = residuals

    def body(block, matrix, carry, d_matrix):
        dlhs, drhs = carry
        rows, d_rows = block.take(lhs), block.take(dout)
        dlhs = block.put(dlhs, product(d_rows, transposed(matrix)))
        return (dlhs, drhs), d_matrix + product(transposed(rows), d_rows)

    def write(carry, groups, d_matrix):
        return carry[0], put_groups(carry[1], groups, d_matrix)

    sums = jnp.zeros_like(rhs, shape=(LANES, *rhs.shape[1:]))
    carry = jnp.zeros_like(lhs), jnp.zeros_like(rhs)
    read = lambda groups: of_groups(rhs, groups)  # noqa: E731
    return *for_each_block(sizes, lhs.shape[0], read, body, carry, sums, write), None


_blocked.defvjp(_blocked_forward, _blocked_backward)
