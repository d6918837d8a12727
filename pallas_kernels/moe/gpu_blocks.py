"""What the MoE's GPU kernels share: their sizes and tiles, and how a program reads and writes rows that it owns.

Rows are the copies of tokens sorted by expert (dispatch.py), M = T * k of them if none is routed nowhere. A block is a
tile's number of consecutive rows of one expert, its last block those that are left.

Invariant: a row that a program does not own reads as 0 and is not written; no other row has any part in its results.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Bool, Int

from pallas_kernels import gpu
from pallas_kernels.gpu import Operand
from pallas_kernels.moe.dispatch import Activation


class Tile(NamedTuple):
    """How a kernel is cut: rows and columns of a program's result, what it contracts at a time, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the kernels. `up` and `down` have the same rows, those of a block; so have `d_hidden`, `d_rows`."""

    up: Tile
    down: Tile
    d_hidden: Tile
    d_rows: Tile
    d_up: Tile
    d_down: Tile


class Sizes(NamedTuple):
    """What a launch depends on; `rows` is T * k, tiles divide the widths."""

    tokens: int
    rows: int
    experts: int
    latent: int
    inner: int
    dtype: jnp.dtype
    matrices: jnp.dtype  # of the gradients of w1, w3, w2
    activation: Activation
    tiles: Tiles
    interpret: bool

    def blocks(self, rows: int) -> int:
        """The most blocks of so many rows that the rows can be cut into."""
        return (self.rows + min(self.experts, self.rows) * (rows - 1)) // rows

    def dot(self, a: Array, b: Array, a_axis: int = 1, b_axis: int = 0) -> Array:
        """Product over one axis of each -> fp32."""
        return gpu.dot(a, b, a_axis=a_axis, b_axis=b_axis, interpret=self.interpret)

    def of_tokens(self) -> Operand:
        """x or dU [T,L]."""
        return whole((self.tokens, self.latent), self.dtype)

    def of_rows(self, width: int) -> Operand:
        """[M,width]."""
        return whole((self.rows, width), self.dtype)

    def numbers(self, dtype: jnp.dtype) -> Operand:
        """[M]."""
        return whole((self.rows,), dtype)

    def table(self, tile: Tile) -> Operand:
        """Expert, first row, end of the expert's rows, of each block: [3,blocks]."""
        return whole((3, self.blocks(tile.rows)), jnp.int32)

    def bounds(self) -> Operand:
        """Where the rows of each expert begin, and where the last one's end."""
        return whole((self.experts + 1,), jnp.int32)

    def up_matrix(self) -> Operand:
        """w1 or w3 [E,L,F]."""
        return whole((self.experts, self.latent, self.inner), self.dtype)

    def down_matrix(self) -> Operand:
        """w2 [E,F,L]."""
        return whole((self.experts, self.inner, self.latent), self.dtype)


class Rows(NamedTuple):
    """Consecutive rows in a kernel, of which a program owns the first ones."""

    at: pl.Slice
    owned: Bool[Array, "rows"]

    def numbers(self, ref) -> Array:
        """Those of ref [M]."""
        return triton.load(ref.at[self.at], mask=self.owned, other=jnp.zeros((), ref.dtype))

    def read(self, ref, columns: pl.Slice) -> Array:
        """Columns of ref [M,*]."""
        mask = self._owned(columns.size)
        return triton.load(ref.at[self.at, columns], mask=mask, other=jnp.zeros((), ref.dtype))

    def gather(self, ref, token: Int[Array, "rows"], columns: pl.Slice) -> Array:
        """Columns of ref [T,*] in the rows' tokens."""
        mask = self._owned(columns.size)
        column = columns.start + lax.iota(jnp.int32, columns.size)
        # The interpreter takes arrays or slices, not both, and arrays of one shape.
        index, column = (jnp.broadcast_to(x, mask.shape) for x in (token[:, None], column[None]))
        return triton.load(ref.at[index, column], mask=mask, other=jnp.zeros((), ref.dtype))

    def write(self, ref, columns: pl.Slice, values: Array) -> None:
        """Puts values into columns of ref [M,*]."""
        triton.store(ref.at[self.at, columns], values.astype(ref.dtype), mask=self._owned(columns.size))

    def write_numbers(self, ref, column: Array, values: Array) -> None:
        """Puts values into one column of ref [M,*]."""
        triton.store(ref.at[self.at, column], values, mask=self.owned)

    def _owned(self, columns: int) -> Array:
        return jnp.broadcast_to(self.owned[:, None], (self.at.size, columns))


def rows_from(first: Array, end: Array, size: int) -> Rows:
    """`size` rows; those below end are owned."""
    return Rows(pl.ds(first, size), first + lax.iota(jnp.int32, size) < end)


def whole(shape: tuple[int, ...], dtype: jnp.dtype) -> Operand:
    """An array of which a program may read anything."""
    return Operand(shape, dtype, shape, lambda *_: (0,) * len(shape))


def part(index: Array, size: int) -> pl.Slice:
    """Columns of a tile."""
    return pl.ds(index * size, size)


def in_block(table_ref, tile: Tile, body: Callable[[Array, Rows], None]) -> None:
    """Runs body(expert, rows) for the block of a program in a grid (tile, block); nothing for an empty one."""
    block = pl.program_id(1)
    expert, first, end = (table_ref[i, block] for i in range(3))
    pl.when(first < end)(lambda: body(expert, rows_from(first, end, tile.rows)))


def zeros(number: int, tile: Tile) -> tuple[Array, ...]:
    """What `number` sums in the shape of the tile start from."""
    return (jnp.zeros((tile.rows, tile.columns), jnp.float32),) * number


def sums(count: int, step: Callable[[Array], tuple[Array, ...]], number: int, tile: Tile) -> tuple[Array, ...]:
    """The sums over i < count of the arrays step(i), `number` of them in the shape of the tile, in fp32."""
    return lax.fori_loop(0, count, lambda i, carry: tuple(map(jnp.add, carry, step(i))), zeros(number, tile))
