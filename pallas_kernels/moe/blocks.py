"""The loop of the CPU forms: over the groups of sorted rows, and over the blocks of rows of each group.

    group g owns the rows  ends[g] - sizes[g] <= i < ends[g]  and is cut into ceil(sizes[g] / block) blocks

LANES groups advance together, the largest first, then the next largest: a step works on one block of each, [LANES,
block,*], because XLA:CPU runs the products of a batch on several cores but a product of so few rows on one. Lanes
differ in length by what neighbours in the order of sizes differ by, which adds up to the largest group at most. An
empty group costs nothing unless it fills a lane; if lanes are left over, the smallest group is worked on twice, with
the same results.

Invariants: a block reads and writes rows of its own group only, so rows beyond the sum of the sizes are never used; a
group's blocks are taken in order, so its sums have one order.
"""

import math
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

LANES = 2 if (os.cpu_count() or 1) < 4 else 4
TARGET = 128  # rows of a block, about: from there on a product's time follows its rows, and lanes run on several cores
Carry = TypeVar("Carry")
Sums = TypeVar("Sums")


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block, so cut that a group two standard deviations above the mean fills its blocks; at most `rows`."""
    mean = -(-rows // groups)
    likely = mean + 2 * math.isqrt(mean)
    blocks = max(1, round(likely / TARGET))
    return min(rows, -(-likely // (8 * blocks)) * 8)


class Block(NamedTuple):
    """The blocks of a step, one per lane."""

    groups: Int[Array, "LANES"]
    rows: Int[Array, "LANES block"]
    owned: Bool[Array, "LANES block"]

    def take(self, array: Array) -> Array:
        """The rows of array [M,*] -> [LANES,block,*], 0 for those that are not owned."""
        return self.only(jnp.asarray(array).at[self.rows].get(mode="promise_in_bounds", wrap_negative_indices=False))

    def only(self, values: Array) -> Array:
        """values [LANES,block,*], 0 for rows that are not owned."""
        return jnp.where(self._owned(values.ndim), values, 0)

    def put(self, array: Array, values: Array) -> Array:
        """array [M,*] with values [LANES,block,*] in the owned rows."""
        for lane in range(LANES):
            start = self.rows[lane, 0]
            old = lax.dynamic_slice_in_dim(array, start, values.shape[1], allow_negative_indices=False)
            new = jnp.where(self._owned(values.ndim)[lane], values[lane], old)
            array = lax.dynamic_update_slice_in_dim(array, new, start, 0, allow_negative_indices=False)
        return array

    def _owned(self, rank: int) -> Array:
        return self.owned.reshape(self.owned.shape + (1,) * (rank - 2))


def of_groups(array: Float[Array, "G ..."], groups: Int[Array, "LANES"]) -> Array:
    """The matrices of the lanes' groups, [LANES,*]."""
    return jnp.asarray(array).at[groups].get(mode="promise_in_bounds", wrap_negative_indices=False)


def put_groups(array: Float[Array, "G ..."], groups: Int[Array, "LANES"], values: Float[Array, "LANES ..."]) -> Array:
    """array with the lanes' matrices in their places, in array's dtype."""
    for lane in range(LANES):
        value = values[lane][None].astype(array.dtype)
        array = lax.dynamic_update_slice_in_dim(array, value, groups[lane], 0, allow_negative_indices=False)
    return array


def for_each_block(
    sizes: Int[Array, "G"],
    rows: int,
    read: Callable[[Array], Array | tuple[Array, ...]],
    body: Callable[..., tuple[Carry, Sums]],
    carry: Carry,
    sums: Sums = None,
    write: Callable[[Carry, Array, Sums], Carry] = lambda carry, groups, sums: carry,
) -> Carry:
    """Folds over all blocks: `carry, sums = body(block, read(groups), carry, sums)`.

    Args:
        sizes: [G] int32 rows of each group, with a sum of at most `rows`; G, rows >= 1.
        rows: M, of the arrays that blocks take from.
        read: what the blocks of the lanes' groups have in common, such as their matrices.
        body: the work of a step.
        carry: goes through all steps.
        sums: what the sums of each turn's groups start from.
        write: puts the sums of the lanes' groups into the carry when all their blocks are done.
    """
    groups, block = sizes.shape[0], block_rows(rows, sizes.shape[0])
    ends, order = lax.cumsum(sizes), jnp.argsort(sizes, descending=True).astype(jnp.int32)
    order = jnp.concatenate([order, jnp.broadcast_to(order[-1:], (-groups % LANES,))])
    ordinal = jnp.arange(block, dtype=jnp.int32)

    def turn(index: Array, carry: Carry) -> Carry:
        lanes = lax.dynamic_slice_in_dim(order, index * LANES, LANES, allow_negative_indices=False)
        # Without the barrier XLA reads the matrices of all groups again at every block.
        common = lax.optimization_barrier(read(lanes))
        size, end = of_groups(sizes, lanes), of_groups(ends, lanes)

        def step(index: Array, state: tuple[Carry, Sums]) -> tuple[Carry, Sums]:
            first = end - size + index * block
            # A block that would run past the array is moved back, over rows that it does not own.
            at = jnp.minimum(first, rows - block)[:, None] + ordinal[None]
            owned = (at >= first[:, None]) & (at < end[:, None])
            return body(Block(lanes, at, owned), common, *state)

        carry, total = lax.fori_loop(0, _pieces(jnp.max(size), block), step, (carry, sums))
        return write(carry, lanes, total)

    return lax.fori_loop(0, _pieces(jnp.sum(sizes > 0, dtype=jnp.int32), LANES), turn, carry)


def _pieces(whole: Array, piece: int) -> Array:
    """How many pieces it takes to cover the whole, both int32."""
    return lax.div(whole + (piece - 1), jnp.int32(piece))


def product(a: Float[Array, "LANES m k"], b: Float[Array, "LANES k n"]) -> Float[Array, "LANES m n"]:
    """Matrix product of each lane."""
    return lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)


def transposed(a: Float[Array, "LANES m n"]) -> Float[Array, "LANES n m"]:
    """Each lane's matrix transposed."""
    return a.swapaxes(1, 2)
