"""What the GPU kernels of KDA share: sizes and tiles of a launch, the blocks of its arrays, sums of log decays.

Two grids occur. Kernels that work on chunks have one program for each (head, chunk, batch); `tokens`, `numbers`,
`operand`, ... are their blocks. Kernels that carry the state along a row have one for each (block of value channels,
head, batch); their blocks, `all_tokens` and so on, hold all of a row, out of which a program reads piece by piece: to
Triton a block is a pointer, so that no memory of a program grows with T.

Invariant: operands of matrix products have `Sizes.dtype`, everything else is fp32.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.gpu import Operand, dot


class Tiles(NamedTuple):
    """How the kernels are cut: tokens of a chunk, channels at a time, warps, stages of the loads' pipeline."""

    chunk: int
    operand_channels: int
    operand_warps: int
    scan_values: int
    scan_warps: int
    scan_stages: int
    back_values: int
    back_warps: int
    back_stages: int
    pairs_values: int
    pairs_warps: int
    gradient_channels: int
    gradient_warps: int


class Sizes(NamedTuple):
    """What a launch depends on. `dtype` is that of query, key, value and of the operands of products."""

    batch: int
    length: int
    heads: int
    value_heads: int
    width: int
    value_width: int
    dtype: jnp.dtype
    chunk: int
    scale: float
    state_every: int
    tiles: Tiles
    interpret: bool

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.length // self.chunk

    @property
    def levels(self) -> int:
        """Binary levels of a chunk."""
        return self.chunk.bit_length() - 1

    @property
    def states(self) -> int:
        """States kept of a row."""
        return -(-self.chunks // self.state_every)

    # Products.

    def product(self, a: Array, b: Array, a_axis: int = 1, b_axis: int = 0) -> Array:
        """Product of operands rounded to `dtype` -> fp32."""
        return dot(a.astype(self.dtype), b.astype(self.dtype), a_axis=a_axis, b_axis=b_axis, interpret=self.interpret)

    def precise(self, a: Array, b: Array, a_axis: int = 1, b_axis: int = 0) -> Array:
        """Product of fp32 operands -> fp32."""
        return dot(a, b, a_axis=a_axis, b_axis=b_axis, interpret=self.interpret)

    def sums(self, covers: Array, x: Array, transpose: bool = False) -> Array:
        """covers @ x, or covers^T @ x, of a 0/1 matrix in bf16 and fp32 numbers [chunk,*].

        The numbers are taken apart into bf16 ones of 8 bits, three of them for fp32 accuracy: their products with 0
        and 1 are exact, and so is the sum but for its rounding.
        """
        total = None
        for _ in range(3 if self.dtype == jnp.float32 else 2):
            part = x.astype(jnp.bfloat16)
            sums = dot(covers, part, a_axis=0 if transpose else 1, interpret=self.interpret)
            total = sums if total is None else total + sums
            x = x - part.astype(jnp.float32)
        return total

    # Blocks for the grid (head, chunk, batch).

    def tokens(self, width: int, dtype: jnp.dtype, heads: int | None = None) -> Operand:
        """An array [B,T,heads,width], by chunk; `heads` None is value heads."""
        heads = self.value_heads if heads is None else heads
        group = self.value_heads // heads
        shape = self.batch, self.length, heads, width
        return Operand(shape, dtype, (None, self.chunk, None, width), lambda h, c, b: (b, c, h // group, 0))

    def values(self) -> Operand:
        """Values, outputs, or their gradients [B,T,HV,V], by chunk."""
        return self.tokens(self.value_width, self.dtype)

    def keys(self) -> Operand:
        """Queries or keys [B,T,H,K], by chunk."""
        return self.tokens(self.width, self.dtype, self.heads)

    def log_decays(self) -> Operand:
        """An fp32 array [B,T,HV,K], by chunk."""
        return self.tokens(self.width, jnp.float32)

    def numbers(self) -> Operand:
        """An fp32 array [B,T,HV], by chunk."""
        shape = self.batch, self.length, self.value_heads
        return Operand(shape, jnp.float32, (None, self.chunk, None), lambda h, c, b: (b, c, h))

    def operand(self, width: int) -> Operand:
        """An array [B,HV,T,width] that only the kernels see, by chunk."""
        shape = self.batch, self.value_heads, self.length, width
        return Operand(shape, self.dtype, (None, None, self.chunk, width), lambda h, c, b: (b, h, c, 0))

    def square(self) -> Operand:
        """A matrix of pairs of tokens for each chunk, [B,HV,T,chunk]."""
        return self.operand(self.chunk)

    def total(self) -> Operand:
        """The fp32 decays over whole chunks [B,HV,chunks,K], by chunk."""
        shape = self.batch, self.value_heads, self.chunks, self.width
        return Operand(shape, jnp.float32, (None, None, None, self.width), lambda h, c, b: (b, h, c, 0))

    def state(self, dtype: jnp.dtype) -> Operand:
        """States [B,HV,chunks,V,K], by chunk."""
        shape = self.batch, self.value_heads, self.chunks, self.value_width, self.width
        return Operand(shape, dtype, (None, None, None, *shape[3:]), lambda h, c, b: (b, h, c, 0, 0))

    def update(self) -> Operand:
        """V~ with its channels first, [B,HV,chunks,V,chunk], by chunk."""
        shape = self.batch, self.value_heads, self.chunks, self.value_width, self.chunk
        return Operand(shape, self.dtype, (None, None, None, *shape[3:]), lambda h, c, b: (b, h, c, 0, 0))

    def tables(self) -> tuple[Operand, Operand]:
        """The 0/1 matrices of chunk.tables for all programs: the log decays of factors, the pairs of levels."""
        return tuple(
            Operand((n, self.chunk, self.chunk), dtype, (n, self.chunk, self.chunk), lambda h, c, b: (0, 0, 0))
            for n, dtype in ((self.levels + 2, jnp.bfloat16), (self.levels, self.dtype))
        )

    # Blocks for the grid (block of value channels, head, batch).

    def all_operands(self, width: int) -> Operand:
        """As `operand`, all of a row."""
        return self.operand(width)._replace(block=(None, None, self.length, width), index=lambda v, h, b: (b, h, 0, 0))

    def all_totals(self) -> Operand:
        """As `total`, all of a row."""
        return self.total()._replace(block=(None, None, self.chunks, self.width), index=lambda v, h, b: (b, h, 0, 0))

    def all_values(self, block: int) -> Operand:
        """As `values`, all of a row, by blocks of channels."""
        return self.values()._replace(block=(None, self.length, None, block), index=lambda v, h, b: (b, 0, h, v))

    def all_numbers(self) -> Operand:
        """As `numbers`, all of a row."""
        return self.numbers()._replace(block=(None, self.length, None), index=lambda v, h, b: (b, 0, h))

    def one_state(self, block: int) -> Operand:
        """An fp32 state [B,HV,V,K], by blocks of value channels."""
        shape = self.batch, self.value_heads, self.value_width, self.width
        return Operand(shape, jnp.float32, (None, None, block, self.width), lambda v, h, b: (b, h, v, 0))

    def all_states(self, states: int, dtype: jnp.dtype, block: int) -> Operand:
        """States [B,HV,states,V,K], all of a row, by blocks of value channels."""
        shape = self.batch, self.value_heads, states, self.value_width, self.width
        block_shape = (None, None, states, block, self.width)
        return Operand(shape, dtype, block_shape, lambda v, h, b: (b, h, 0, v, 0))
